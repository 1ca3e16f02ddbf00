"""Train an EAGLE-3 draft with speculators on a CPU; runs in the environment of that package.

    .venv-speculators/bin/python scripts/train_speculators.py --verifier-name-or-path TARGET ...

The arguments are those of `speculators train`. Its trainer takes the number of an accelerator as
its device, and waits for it before it reads the clock: here it gets the CPU, which needs no wait.
Nothing of this project is imported.
"""

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda: None
    main(TrainConfig.resolve())
