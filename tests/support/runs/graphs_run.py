"""Count announced and compiled graphs of training and an evaluation in a separate process; print JSON.

A fresh process has no compiled graphs yet, and frees their memory at its end.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from data.packing.documents import Packed
from infer.config import EvaluationConf
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.evaluate import evaluate_drafts
from models.device.device import Device
from models.drafts.base import Draft
from models.targets.target import Target
from models.trees.config import TreeConf
from tests.support.data.packed import packed_of
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU, VOCAB, batch_of, new_draft, tiny_target
from tests.support.runs.toy_run import toy_conf
from train.config.run import TrainConf
from train.distributed.build import build_parallel
from train.run.log import MetricLogger
from train.run.state import RunState, flatten_config
from train.trainer import Trainer

LENGTHS = (5, 70)  # two padded lengths
ROWS, LENGTH = 10, 24
TREE = TreeConf(depth=3, nodes=6, beam_width=2, children=3, ngram_tokens=4)


def draw_texts(*lengths: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in lengths]


def build_rows() -> Packed:
    return packed_of(batch_of(draw_texts(*[LENGTH] * ROWS)))


def train(name: str, target: Target, device: Device, **data) -> dict[str, dict[str, int]]:
    """Train on ten rows, four a step: the last group of features in memory is not full."""
    case = CASES[name]
    conf = toy_conf(draft=case.conf, optim={"steps": 4})
    conf.data = replace(conf.data, row_length=LENGTH, **data)
    draft = case.build(target)
    counted = run_loop(conf, draft, target, device).counts()
    return {kind: count for kind, count in counted.items() if any(count.values())}


def run_loop(conf: TrainConf, draft: Draft, target: Target, device: Device):
    with tempfile.TemporaryDirectory() as folder:
        return run_loop_in(Path(folder), conf, draft, target, device)


def run_loop_in(folder: Path, conf: TrainConf, draft: Draft, target: Target, device: Device):
    parallel = build_parallel(conf.parallel, device, trackers=[])
    state = RunState(folder, flatten_config(conf))
    budgets = []

    def evaluate(_: Draft) -> dict[str, float]:
        budgets.append(device.ledger.budget)
        return {"delivered_per_round": 1.0}

    Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=build_rows(),
        run_state=state,
        metric_logger=MetricLogger(conf.log, state, parallel.accelerator),
        evaluate=evaluate,
    ).run()
    return budgets[-1]


def write_prompt_file(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [
        json.dumps({"id": i, "category": "ab"[i % 2], "text": " ".join(map(str, ids))})
        for i, ids in enumerate(draw_texts(*LENGTHS))
    ]
    file.write_text("\n".join(lines))
    return file


def run_evaluation(target: Target) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = write_prompt_file(Path(folder))
        conf = EvaluationConf(prompts=str(file), max_new_tokens=4, batch_sizes=[2])
        drafts = [new_draft(target, layers=[0, 1]) for _ in range(2)]
        tested = DraftUnderTest(name="trained", draft=drafts[0], untrained=drafts[1])
        return evaluate_drafts(target, [tested], tree=TREE, conf=conf)


def main() -> None:
    torch.set_num_threads(1)
    device = replace(CPU, compiles=True, backend="eager")  # compiles nothing, which is quick
    target = tiny_target(seed=0, device=device, layers=2)
    graphs = {"training": train("eagle1", target, device, keep_features=True)}
    report = run_evaluation(target)
    graphs["evaluation"] = report.setup.graphs
    late = report.setup.graphs_after_warmup
    print(json.dumps({"graphs": graphs, "late": late}))  # noqa: T201


if __name__ == "__main__":
    main()
