"""The run folder as a place to write: claimed before anything slow, refused in one line if full."""

import errno
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from models.checkpoint import PARTIAL
from models.drafts.base import Draft
from models.errors import UserError
from models.target.target import Target

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch and safetensors write from C++ and Rust, and carry the reason in words at best: what torch
# says of a short write is `unexpected pos`.
FULL_WORDS = ("no space left", "quota exceeded", "file too large", "unexpected pos", "write failed")
REPORTS = ("report.json", "report.md", "report.html", "rounds.jsonl")
RESULTS = (
    "checkpoint", "metrics.jsonl", *REPORTS, "training_prompts.npy", "held_out.jsonl",
    "selection.jsonl", "vocabulary.md", "config.yaml",
)  # fmt: skip


def claim(folder: Path) -> None:
    """Make the run folder and write into it. Raises UserError where that cannot be done."""
    with refuse_full_disk(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno in FULL:
                raise
            raise UserError(
                f"output_dir: must be writable, got {folder} ({error.strerror}); "
                "choose another output_dir"
            ) from error


def clear(folder: Path) -> None:
    """Start over: remove what an earlier run of this name left, its state first and in one move."""
    state, gone = folder / "state", folder / f"state{PARTIAL}"
    shutil.rmtree(gone, ignore_errors=True)
    if state.exists():
        state.rename(gone)
        shutil.rmtree(gone)
    for result in (folder / name for name in RESULTS):
        if result.is_dir():
            shutil.rmtree(result)
        else:
            result.unlink(missing_ok=True)


def reserve(folder: Path, draft: Draft, target: Target | None = None, *, states: int = 2) -> None:
    """Raises UserError unless what a run of this draft writes has room."""
    needed, free = room(draft, target, states=states), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"output_dir: needs {needed / 1e9:.2f} GB of free disk for this draft, "
            f"got {free / 1e9:.2f} GB in {folder}; free some space or choose another output_dir"
        )


def room(draft: Draft, target: Target | None = None, *, states: int = 2) -> int:
    """Return the bytes of so many states and of two checkpoints, old and new.

    A state has what is trained and its two moments. A draft that adapts its `target` keeps the
    adapted one in its checkpoint.
    """
    needed = 2 * size(draft.parameters()) + states * 3 * size(learning(draft))
    if target is not None and (adapted := draft.verifier(target)) is not None:
        model = adapted.model  # written with its adapters, which alone learn, added to its weights
        needed += 2 * (size(model.parameters()) - size(learning(model)))
    return needed


def size(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


def learning(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def refuse_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk into one line."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        words = str(error).lower()
        if getattr(error, "errno", None) not in FULL and not any(w in words for w in FULL_WORDS):
            raise
        raise UserError(
            f"output_dir: the disk is full, got {folder}; free some space and start the "
            "same command again: it continues from the last state"
        ) from error
