"""The run folder on disk: checked before anything slow, with a one-line error for a full disk."""

import errno
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from models.drafts.base import Draft
from models.errors import UserError, require
from models.files import PARTIAL_SUFFIX, report_disk_errors
from models.target.target import Target

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch and safetensors write from C++ and Rust, whose errors have the reason in their text at best:
# torch reports a short write as `unexpected pos`.
DISK_FULL_MESSAGES = (
    "no space left",
    "quota exceeded",
    "file too large",
    "unexpected pos",
    "write failed",
)
REPORT_FILES = ("report.json", "report.md", "report.html", "rounds.jsonl")
RUN_FILES = (
    "metrics.jsonl", *REPORT_FILES, "training_prompts.npy", "held_out.jsonl",
    "selection.jsonl", "vocabulary.md", "config.yaml",
)  # fmt: skip


def create_run_dir(folder: Path) -> None:
    """Create the run folder and check that it is writable; raise UserError otherwise."""
    with report_disk_errors(folder, remedy="choose another"), refuse_full_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))


def reset_run_dir(folder: Path) -> None:
    """Remove what an earlier run of this name left, its state first and by one rename."""
    state, removed = folder / "state", folder / f"state{PARTIAL_SUFFIX}"
    shutil.rmtree(removed, ignore_errors=True)
    if state.exists():
        state.rename(removed)
        shutil.rmtree(removed)
    if (folder / "checkpoint").exists():
        shutil.rmtree(folder / "checkpoint")
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def check_free_disk(
    folder: Path, draft: Draft, target: Target | None = None, *, num_states: int = 2
) -> None:
    """Check that the disk has room for what a run of this draft writes; raise UserError if not."""
    needed = disk_bytes_needed(draft, target, num_states=num_states)
    free = shutil.disk_usage(folder).free
    require(
        free >= needed,
        f"output_dir: needs {needed / 1e9:.2f} GB of free disk for this draft, "
        f"got {free / 1e9:.2f} GB in {folder}; free some space or choose another output_dir",
    )


def disk_bytes_needed(draft: Draft, target: Target | None = None, *, num_states: int = 2) -> int:
    """Return the bytes of `num_states` states and of two checkpoints, old and new.

    A state holds the trained weights and their two moments. The checkpoint of a draft that adapts
    its `target` includes the adapted target.
    """
    needed = 2 * parameter_bytes(draft.parameters()) + num_states * 3 * parameter_bytes(
        trained_parameters(draft)
    )
    if target is not None and (adapted := draft.target_for(target)) is not None:
        model = adapted.model  # the adapters, its only trained part, are merged when written
        needed += 2 * (
            parameter_bytes(model.parameters()) - parameter_bytes(trained_parameters(model))
        )
    return needed


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the parameters."""
    return sum(p.numel() * p.element_size() for p in parameters)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def refuse_full_disk(folder: Path) -> Iterator[None]:
    """Turn the errors of a full disk into a UserError of one line."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        is_full = any(part in str(error).lower() for part in DISK_FULL_MESSAGES)
        if getattr(error, "errno", None) not in DISK_FULL_ERRNOS and not is_full:
            raise
        raise UserError(
            f"output_dir: the disk is full, got {folder}; free some space and start the "
            "same command again: it continues from the last state"
        ) from error
