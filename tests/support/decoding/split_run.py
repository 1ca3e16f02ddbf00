"""Decode with a target that the processes of torchrun split: split_run.py FOLDER; results in FOLDER/rank-N.json."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from data.config import Dtype
from data.eval_prompts.prompts import EvalPrompt
from infer.commands.tree_tuning import tune_drafts
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import RoundSeconds, read_clock
from models.device.config import DeviceConf, DeviceName
from models.device.device import Device
from models.device.opening import open_device
from models.drafts.registry import load_draft
from models.parallel.config import TensorConf
from models.parallel.processes import connect_processes
from models.targets.config import TargetConf
from models.targets.loading import load_split_target
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from tests.support.data.captured import captured, conf
from tests.support.models.tiny import chain, mixed, tree
from tests.support.reports.tuning import costs
from tests.support.runs.parallel_run import DRAFTS, count_held

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
TREES = {"chain": chain(2), "dynamic": tree(2), "mixed": mixed()}
NEW_TOKENS = 12
COMPILED = "eagle3"


def open_cpu(*, compiles: bool) -> Device:
    """Open a CPU whose graphs are traced as those of every backend, but not translated."""
    device = open_device(DeviceConf(name=DeviceName.cpu, compile=False))
    return replace(device, compiles=compiles, backend="aot_eager")


def build_decoder(target: Target, folder: Path, method: str, shape: str, temperature: float) -> Decoder:
    return Decoder(
        target,
        load_draft(folder / method, target),
        TREES[shape],
        sampling=SamplingConf(temperature=temperature),
        slots=64,
        batch=2,
    )


def decode_prompts(decoder: Decoder) -> list[list[int]]:
    """Return the tokens of each answer, and how many each of its rounds accepted."""
    rows = decoder.decode(PROMPTS, row_ids=[0, 1], max_new_tokens=NEW_TOKENS, eos_ids=[])
    return [part for row in rows for part in (row.ids, row.accepted)]


def decode_every_way(target: Target, folder: Path) -> dict[str, list[list[int]]]:
    """Decode greedily and sampled, by every method and tree that it can propose."""
    ways = [(method, shape) for method, shape in product(DRAFTS, TREES) if shape != "mixed" or method == "eagle3"]
    return {
        f"{method}, {shape}, {temperature}": decode_prompts(build_decoder(target, folder, method, shape, temperature))
        for (method, shape), temperature in product(ways, (0.0, 1.0))
    }


def decode_compiled(target: Target, folder: Path) -> dict[str, Any]:
    """Decode in announced graphs; return the answers, and how many graphs came unannounced."""
    answers, late = {}, 0
    for shape, temperature in (("chain", 1.0), ("dynamic", 0.0)):
        decoder = build_decoder(target, folder, COMPILED, shape, temperature)
        needed = list_graphs(decoder.session, list(map(len, PROMPTS)))
        with target.device.expect_graphs(needed, lambda _: None) as budget:
            with target.device.ledger.warming():
                decode_prompts(decoder)
            answers[f"{COMPILED}, {shape}, {temperature}"] = decode_prompts(decoder)
        assert budget is not None
        late += budget.compiled_late + budget.unannounced
    return {"answers": answers, "late": late, "compiled": target.device.compiles}


def count_decoding_values(target: Target) -> dict[str, int]:
    """Count the target's weights and the values of a cache of its keys and values that this process holds."""
    cache = target.new_cache(batch=2, slots=64)
    return {
        "weights": count_held(target.model),
        "cache": sum(tensor.numel() for tensor in [*cache.keys, *cache.values]),
    }


def tune_by_wild_clocks(target: Target, folder: Path) -> list[Any]:
    """Tune by clocks that run as they like on every process but the main one."""
    if dist.get_rank() > 0:
        time.perf_counter = _run_wild().__next__
    return tune(target, folder, read_clock)


def tune(target: Target, folder: Path, round_seconds: RoundSeconds) -> list[Any]:
    """Tune by what rounds cost; return the choice and all costs."""
    prompts = [EvalPrompt(id=str(i), category="a", ids=ids) for i, ids in enumerate(PROMPTS)]
    conf = TuneConf(
        batch=[2], depth=2, nodes=[2, 4], ranks=3, ngram_tokens=0, ngram_windows=[2], repeats=1, max_new_tokens=8
    )
    drafts = {COMPILED: (folder / COMPILED, load_draft(folder / COMPILED, target))}
    (tuning,) = tune_drafts(target, drafts, prompts, conf, [max(map(len, PROMPTS)) + 8], round_seconds)
    (result,) = tuning.results
    costs = {candidate.name: result.cost_curve.steps(candidate) for candidate in tuning.candidates}
    return [result.best.name, costs]


def _run_wild() -> Iterator[float]:
    now, numbers = 0.0, Random(7)
    while True:
        now += numbers.random()
        yield now


def capture(folder: Path, *, tensor: int) -> Path:
    """Capture the features of the documents in `folder`, and return the store."""
    options = {"draft": DRAFTS[COMPILED], "dtype": Dtype.bf16, "run_name": f"by-{tensor}"}
    return captured(conf(folder, parallel=TensorConf(tensor=tensor), **options))


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    connect_processes("cpu")
    source, rank = TargetConf(path=str(folder / "target")), dist.get_rank()
    eager, compiled = (
        load_split_target(source, open_cpu(compiles=compiles), tensor=dist.get_world_size())
        for compiles in (False, True)
    )
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        local = eager.model(input_ids=ids).logits
    result = {
        "answers": decode_every_way(eager, folder),
        "compiled": decode_compiled(compiled, folder),
        "held": count_decoding_values(eager),
        "tuned_by_table": tune(eager, folder, costs(node_s=0.01)),
        "tuned": tune_by_wild_clocks(eager, folder),
        "same_with_gradients": torch.allclose(local, eager.model(input_ids=ids).logits, atol=1e-5),
        "fingerprint": eager.fingerprint,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    capture(folder, tensor=dist.get_world_size())  # it leaves the processes


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
