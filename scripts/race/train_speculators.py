"""Train an EAGLE-3 draft with speculators on a CPU; runs in the environment of that package.

    .venv-speculators/bin/python scripts/race/train_speculators.py --verifier-name-or-path TARGET ...

The arguments are those of `speculators train`. Its trainer takes the number of an accelerator as its device, and waits
for it before it reads the clock: here it gets the CPU, which needs no wait. The records of the logged steps are written
to `steps.jsonl` in the folder of the checkpoints. Nothing of this project is imported.
"""

import json
from pathlib import Path

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig


class StepLog:
    """A logger that writes each record on a line of its own instead of the console."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file.open("w", buffering=1)

    def info(self, record: dict, **_: object) -> None:
        """Write the record of a step or of a validation."""
        self.file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda: None
    conf = TrainConfig.resolve()
    trainer.metric_logger = StepLog(Path(conf.trainer.save_path) / "steps.jsonl")
    main(conf)
