"""Train and decode with one method on one device: xla_run.py METHOD xla|cpu FOLDER, by test_xla.py.

It trains a draft of the tiny target and decodes with a checkpoint: its own on the CPU, the CPU's on
XLA, so that both decode with the same weights. FOLDER/DEVICE.json and .pt hold the results.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from data.packing.documents import Packed
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from models.device.config import DeviceConf, DeviceName, Precision
from models.device.device import Device
from models.device.opening import open_device
from models.drafts.options import CausalLMConf, Eagle3Conf, InitFrom, MedusaConf
from models.drafts.registry import build_draft, load_draft
from models.losses.config import LossConf, LossName
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from tests.support.data.packed import packed_of
from tests.support.models.tiny import LAYERS, VOCAB, batch_of, chain, sampled_texts, tiny_target, tree
from tests.support.runs.toy_run import toy_conf
from train.config.run import TrainConf
from train.distributed.build import build_parallel
from train.planning import graph_plan
from train.run.log import MetricLogger
from train.run.state import RunState, flatten_config
from train.trainer import Trainer

STEPS, LENGTH, NEW, SLOTS = 200, 40, 24, 128
ROWS = 4  # of a micro-batch
# method -> draft, learning rate, micro-batches a step
METHODS = {
    "eagle3": (Eagle3Conf(layers=LAYERS, ttt_steps=3), 5e-3, 1),
    "medusa": (MedusaConf(heads=4), 2e-2, 2),
    "draft model": (CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5]), 5e-3, 1),
}


def build_conf(method: str) -> TrainConf:
    draft, lr, micro_batches = METHODS[method]
    optim = {
        "steps": STEPS,
        "lr": lr,
        "max_grad_norm": 1e3,
        "rows_per_step": ROWS * micro_batches,
        "micro_batch_size": ROWS,
    }
    conf = toy_conf(draft=draft, optim=optim)
    conf.loss, conf.interval.log = LossConf(name=LossName.soft_ce, step_decay=1.0), 1
    conf.interval.eval = conf.interval.save = STEPS
    conf.data.row_length = LENGTH
    return conf


class RecordingTrainer(Trainer):
    """A trainer that records the first gradient, and the number of graphs behind the first step."""

    def _take_step(self) -> None:
        super()._take_step()
        if not self.run_state.progress.step:
            decay = self.conf.optim.betas[0]  # the first average is the gradient times 1 - decay
            optimizer = self.training_state.optimizers[0]
            self.gradient = [optimizer.state[p]["exp_avg"].cpu() / (1 - decay) for p in self.trained]
            self.warm = self.parallel.device.count_graphs()


def draw_prompts() -> list[list[int]]:
    """Draw twenty prompts of different lengths, in two buckets."""
    numbers = torch.Generator().manual_seed(2)
    lengths = range(3, 3 + 5 * 20, 5)
    return [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in lengths]


def build_target(device: Device) -> tuple[Target, Packed]:
    """Return the target on the device, and texts that it has written on the CPU."""
    batch = batch_of(sampled_texts(tiny_target(seed=0), count=16, length=LENGTH))
    host = replace(device, torch_device=torch.device("cpu"))  # the target is checked on the CPU first
    target = tiny_target(seed=0, device=host)
    target.model.to(device.torch_device)
    target.device = device
    return target, packed_of(batch)


def train_draft(device: Device, target: Target, rows: Packed) -> tuple[dict, list[torch.Tensor]]:
    folder, conf = FOLDER / NAME, build_conf(METHOD)
    folder.mkdir(parents=True)
    parallel = build_parallel(conf.parallel, device, trackers=conf.log.list_trackers())
    state = RunState(folder, flatten_config(conf))
    loop = RecordingTrainer(
        conf=conf,
        parallel=parallel,
        target=target,
        rows=rows,
        run_state=state,
        draft=build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed),
        metric_logger=MetricLogger(conf.log, state, parallel.accelerator),
        evaluate=lambda draft: {"delivered_per_round": 1.0},
    )
    loop.run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    announced = len(graph_plan.list_graphs(conf, lazy=device.lazy))
    result = {"losses": [line["train/loss"] for line in lines], "announced": announced}
    return result | {"warm": loop.warm, "compiled": device.count_graphs()}, loop.gradient


def decode_prompts(device: Device, target: Target) -> dict:
    """Decode with both trees, every graph announced; a prompt of each bucket comes first, to warm up."""
    draft = load_draft(FOLDER / "cpu" / "checkpoint", target)
    prompts, result, before = draw_prompts(), {}, device.count_graphs()
    shapes = {"chain": chain(3), "tree": tree(3)}
    decoders = {
        name: Decoder(target, draft, shape, sampling=SamplingConf(), slots=SLOTS) for name, shape in shapes.items()
    }
    lengths = [len(prompt) for prompt in prompts]
    needed = {g for decoder in decoders.values() for g in list_graphs(decoder.session, lengths)}
    with device.ledger.expect_graphs(needed, strict=True) as run:
        for name, decoder in decoders.items():
            with device.ledger.warming():
                decoder.decode([prompts[0], prompts[-1]], row_ids=[0, 19], max_new_tokens=4)
            rows = decoder.decode(prompts, row_ids=list(range(len(prompts))), max_new_tokens=NEW)
            result[name] = [[row.ids, row.accepted] for row in rows]
    graphs = {"announced": run.announced, "by_function": run.compiled, "late": run.compiled_late}
    return result | graphs | {"compiled": device.count_graphs() - before}


def count_fallbacks() -> dict[str, int]:
    """Count how often each operator that XLA does not have ran on the host."""
    from torch_xla.debug import metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: metrics.counter_value(name) for name in names}


if __name__ == "__main__":
    METHOD, NAME, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    device = open_device(DeviceConf(name=DeviceName[NAME], precision=Precision.float32, compile=False))
    target, rows = build_target(device)
    trained, gradient = train_draft(device, target, rows)
    result = {"train": trained, "decode": decode_prompts(device, target)}
    if device.lazy:
        result["fallbacks"] = count_fallbacks()
    torch.save(gradient, FOLDER / f"{NAME}.pt")
    (FOLDER / f"{NAME}.json").write_text(json.dumps(result))
