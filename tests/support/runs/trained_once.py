"""Store weights that fixtures train, under a hash of everything that they depend on."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

from models.io.files import PARTIAL_SUFFIX

ROOT = Path(__file__).parents[3]
SOURCES = ("models/**/*.py", "infer/**/*.py", "tests/support/**/*.py", "tests/conftest.py")


class TrainedOnce:
    """A folder of trained weights; a change of any source or of PyTorch trains them again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.fingerprint = fingerprint_sources()

    def train(self, name: str, module: nn.Module, train: Callable[[], None]) -> None:
        """Load the weights of `module`, or train it and save them."""
        file = self.folder / f"{name}-{self.fingerprint}.pt"
        if file.exists():
            module.load_state_dict(torch.load(file, weights_only=True))
            return
        train()
        partial = file.with_name(f"{file.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        torch.save(module.state_dict(), partial)  # other workers may be training the same
        partial.replace(file)
        for old in self.folder.glob(f"{name}-*.pt"):
            if old != file:
                old.unlink(missing_ok=True)


def fingerprint_sources() -> str:
    """Hash the sources, packages, vector width and threads that weights depend on."""
    versions = (torch.__version__, transformers.__version__)
    machine = (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    digest = hashlib.sha256(repr((versions, machine)).encode())
    for pattern in SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
