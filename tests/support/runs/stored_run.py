"""Train from a store, or live; as a command it is a rank of several processes: FOLDER STORE NAME."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from data.config import DataConf, DataSource
from models.device.config import DeviceConf, DeviceName, Precision
from models.drafts.options import CausalLMConf, DraftConf, Eagle1Conf, Eagle3Conf, HydraConf, InitFrom, MedusaConf
from models.drafts.registry import build_draft
from models.losses.config import LossConf, LossName
from models.parallel.processes import leave_processes
from models.targets.config import TargetConf
from tests.support.data.captured import LENGTH
from tests.support.models.tiny import LAYERS, VOCAB
from tests.support.runs.toy_run import metrics, toy_length
from train.checks import build_run_parallel
from train.config.optim import OptimConf
from train.config.run import HeldOutConf, IntervalConf, TrainConf
from train.rows.packed_rows import load_training_rows
from train.rows.row_facts import choose_vocabulary
from train.rows.stored_target import build_run_target
from train.run.folder import open_run
from train.run.log import MetricLogger
from train.trainer import Trainer

BF16 = "bfloat16"
METHODS = {
    "eagle3": Eagle3Conf(layers=LAYERS, ttt_steps=2, vocab_size=40),
    "eagle1": Eagle1Conf(feature_noise=0.0),
    "medusa": MedusaConf(heads=4),
    "hydra": HydraConf(heads=4, prefix=False),
    "hydra++": HydraConf(heads=4),
    "draft model": CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5]),
}
EAGLE3, MEDUSA = METHODS["eagle3"], METHODS["medusa"]


def documents(folder: Path) -> Path:
    """Write documents that fill a row each, so that every packing gives the same rows."""
    draw = random.Random(0)
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(24):
            ids = [draw.randrange(1, VOCAB) for _ in range(LENGTH)]
            begins = draw.randint(3, LENGTH - 8)
            answer = [begins <= t < begins + 16 for t in range(LENGTH)]
            file.write(json.dumps({"ids": ids, "answer": answer}) + "\n")
    return folder


def training(
    folder: Path, draft: DraftConf, *, name: str, store: Path | None = None, loss: LossConf | None = None
) -> TrainConf:
    """Configure a run of six steps over the documents, or over a store of them."""
    source = DataSource.jsonl if store is None else DataSource.captured
    path = folder / "documents.jsonl" if store is None else store
    return TrainConf(
        target=TargetConf(name="tiny", path=str(folder / "target")),
        draft=draft,
        data=DataConf(source=source, path=str(path), row_length=LENGTH),
        loss=loss or LossConf(name=LossName.soft_ce),
        device=DeviceConf(name=DeviceName.cpu, precision=Precision(BF16), compile=False),
        optim=OptimConf(steps=6, micro_batch_size=4, lr=3e-3, compile_loss=False),
        held_out=HeldOutConf(selection=2),
        interval=IntervalConf(log=1, eval=3, save=2),
        run_name=name,
        output_dir=str(folder / "train"),
    )


def learned(conf: TrainConf, *, evaluate: Callable = toy_length) -> None:
    """Train as `python -m train` does before its evaluation."""
    torch.set_num_threads(1)
    parallel = build_run_parallel(conf, trackers=[])
    state = open_run(conf, parallel)
    target = build_run_target(conf, parallel)
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    data = load_training_rows(conf, target, draft, parallel)
    rows, store = data.rows, data.store
    choose_vocabulary(draft, target, rows, state.folder)
    Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=rows,
        store=store,
        run_state=state,
        metric_logger=MetricLogger(conf.log, state, parallel.accelerator),
        evaluate=evaluate,
    ).run()


def losses(folder: Path, name: str) -> list[float]:
    return [line["train/loss"] for line in metrics(folder / "train" / name)]


if __name__ == "__main__":
    folder, store, name = sys.argv[1:]
    learned(training(Path(folder), Eagle3Conf(layers=LAYERS, ttt_steps=2), name=name, store=Path(store)))
    leave_processes()
