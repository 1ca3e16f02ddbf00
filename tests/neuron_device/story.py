"""Train, decode and compile on the device in a separate process, for tests/system/test_neuron_device.py.

Nothing here names the device but `device=neuron`. The results go to facts.json.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_neuron_available

from conf.entry import compose
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.drafts.options import CausalLMConf, DraftConf, Eagle1Conf, Eagle3Conf, InitFrom, MedusaConf
from models.drafts.registry import build_draft
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import LAYERS, tiny_target, tree
from tests.support.runs.toy_run import metrics, toy_conf, toy_run
from train.config.run import TrainConf
from train.distributed.build import build_accelerator

DRAFTS: dict[str, DraftConf] = {
    "eagle3": Eagle3Conf(layers=LAYERS, ttt_steps=2),
    "eagle1": Eagle1Conf(token_loss_weight=1.0, feature_noise=0.2),  # with random noise on its features
    "medusa": MedusaConf(heads=4),
    "draft model": CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5]),
}
PROMPTS = [[5, 9, 2, 7, 11, 3], [8, 1, 4]]
GREEDY, SAMPLED = SamplingConf(), SamplingConf(temperature=0.8, seed=3)


def compose_device(name: str, *, compiles: bool = False) -> DeviceConf:
    """Return the device's configuration as the command line composes it."""
    overrides = [f"device={name}", "device.precision=float32", f"device.compile={compiles}"]
    return compose("train", TrainConf, overrides).device


def check_placement() -> dict[str, Any]:
    device = open_device(DeviceConf(name=DeviceName.auto, compile=False))
    accelerator = build_accelerator(device, trackers=[])
    linear = accelerator.prepare(torch.nn.Linear(4, 4, bias=False))
    weight, ones = linear.weight, torch.ones(2, 4, device=device.torch_device)
    with accelerator.autocast():
        inside = torch.nn.functional.linear(ones, weight)
        loss = inside.log_softmax(-1)
    before = weight.detach().clone()
    accelerator.backward(loss.square().mean())
    torch.optim.AdamW(linear.parameters(), lr=0.1).step()
    return {
        "described": device.describe(),
        "accelerate": [is_neuron_available(), str(accelerator.device)],
        "weights": [weight.device.type, str(weight.dtype)],
        "autocast": [str(inside.dtype), str(loss.dtype), inside.device.type],
        "outside": str(torch.nn.functional.linear(ones, weight).dtype),
        "moved": bool((weight != before).all()),
    }


def check_random_state(folder: Path) -> dict[str, Any]:
    accelerator = Accelerator()
    torch.manual_seed(5)
    state = torch.neuron.get_rng_state()
    accelerator.save_state(str(folder / "numbers"))
    torch.manual_seed(6)
    other = torch.neuron.get_rng_state()
    accelerator.load_state(str(folder / "numbers"))
    again = torch.neuron.get_rng_state()
    try:
        torch.rand(2, device=accelerator.device)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {
        "seeded": not torch.equal(state, other),
        "restored": torch.equal(state, again),
        "refused": refused.splitlines()[0],
    }


def train_and_decode(device_name: str, name: str, folder: Path) -> dict[str, Any]:
    """Train for a few steps and decode by trees; return the losses and the answers."""
    device = compose_device(device_name)
    target = tiny_target(seed=0, device=open_device(device))
    conf = toy_conf(draft=DRAFTS[name], device=device, optim=FEW)
    draft, _ = toy_run(folder / name, conf, target=target)
    decoded = {
        kind: Decoder(target, draft.eval(), tree(), sampling=sampling, slots=64, batch=2).decode(
            PROMPTS, row_ids=[0, 1], max_new_tokens=8
        )
        for kind, sampling in (("greedy", GREEDY), ("sampled", SAMPLED))
    }
    return {
        "on": sorted({p.device.type for p in draft.parameters()}),
        "losses": read_losses(folder / name),
        **{kind: [[row.ids, row.accepted] for row in rows] for kind, rows in decoded.items()},
    }


FEW = {"steps": 3, "rows_per_step": 2}


def compile_round_and_loss(folder: Path) -> dict[str, Any]:
    """Compile a fused round and a loss with the device's own compiler, which is found by its name."""
    setting = compose_device("neuron", compiles=True)
    device = open_device(setting)
    target = tiny_target(seed=0, device=device)
    draft = build_draft(DRAFTS["eagle3"], target, loss=toy_conf().loss, seed=0).eval()
    decoder = Decoder(target, draft, tree(), sampling=GREEDY, slots=64)
    before, ids = device.count_graphs(), []
    needed = list_graphs(decoder.session, map(len, PROMPTS))
    with device.ledger.expect_graphs(needed, strict=True) as run:
        for prompt in 2 * PROMPTS:
            (row,) = decoder.decode([prompt], row_ids=[0], max_new_tokens=8)
            ids.append(row.ids)
    after = device.count_graphs()
    conf = toy_conf(draft=DRAFTS["medusa"], device=setting, optim=FEW)
    toy_run(folder / "compiled", conf, target=target)
    return {
        "backend": device.backend,
        "announced": run.announced,
        "compiled": run.compiled,
        "graphs": [after - before, device.count_graphs() - after],
        "ids": ids,
        "losses": read_losses(folder / "compiled"),
    }


def read_losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(folder) if "train/loss" in line]


def main(folder: Path) -> None:
    parts: dict[str, Callable[[], Any]] = {
        "placement": check_placement,
        "random state": partial(check_random_state, folder),
        **{name: partial(train_and_decode, "neuron", name, folder) for name in DRAFTS},
        "compiled": partial(compile_round_and_loss, folder),
    }
    facts = {}
    for name, part in parts.items():
        began = time.perf_counter()
        facts[name] = part()
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.1f} s\n")
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
