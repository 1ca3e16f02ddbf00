"""Checkpoints on disk: safetensors and config.json, written atomically and read strictly.

The metadata has the hashes of the target and tokenizer that a draft was distilled for.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor, nn

from models.checkpoints.checkpoint_files import (
    CONFIG_FILE,
    TARGET_HASH_KEY,
    TOKENIZER_HASH_KEY,
    WEIGHTS_FILE,
    read_metadata,
    report_unreadable,
)
from models.checkpoints.transformers4_keys import add_older_keys
from models.io.errors import UserError, require
from models.io.files import PARTIAL_SUFFIX, atomic_path, report_disk_errors


def save_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: dict[str, Any],
    metadata: dict[str, str],
    write_extra_files: Callable[[Path], None] | None = None,
) -> None:
    """Write model.safetensors and config.json; a failure leaves an existing checkpoint intact.

    `write_extra_files` writes further files, such as a tokenizer's, into the empty folder that it takes.
    """
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with report_disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if write_extra_files is not None:
            with tempfile.TemporaryDirectory(dir=directory, suffix=PARTIAL_SUFFIX) as folder:
                write_extra_files(Path(folder))
                for entry in Path(folder).iterdir():
                    if entry.is_dir():  # a folder replaces none that has files in it
                        shutil.rmtree(directory / entry.name, ignore_errors=True)
                    entry.replace(directory / entry.name)
        with atomic_path(directory / CONFIG_FILE) as config_file, atomic_path(directory / WEIGHTS_FILE) as weights_file:
            write_config(config_file, config)
            # save_file writes under its own temporary name, which a kill would leave behind
            weights_file.write_bytes(safetensors.torch.save(cpu_tensors, metadata={"format": "pt", **metadata}))


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a config.json that transformers 4 and 5 read alike."""
    path.write_text(json.dumps(add_older_keys(config), indent=2, sort_keys=True) + "\n")


def load_tensors(directory: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint onto the CPU, in their stored types.

    `expected` gives names, shapes and types, for example a state dict on the meta device. Raise UserError
    if a tensor is missing or unknown, or has a different shape or kind of number.
    """
    file_path = directory / WEIGHTS_FILE
    with report_unreadable(file_path), safe_open(file_path, framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        problems = [f"lacks {name}" for name in sorted(expected.keys() - shapes.keys())]
        problems += [f"has the unknown tensor {name}" for name in sorted(shapes.keys() - expected)]
        problems += [
            f"has {name} of shape {shapes[name]} instead of {list(expected[name].shape)}"
            for name in sorted(shapes.keys() & expected.keys())
            if shapes[name] != list(expected[name].shape)
        ]
        # If names or shapes differ, no values are read.
        tensors = {} if problems else {name: file.get_tensor(name) for name in expected}
    problems += [
        f"has {name} as {tensor.dtype} instead of {expected[name].dtype}"
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() != expected[name].is_floating_point()
    ]
    problems += [  # nothing that such a draft proposes would be accepted, and no error would say so
        f"has {name} with values that are not finite"
        for name, tensor in sorted(tensors.items())
        if not is_finite(tensor)
    ]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    require(
        not problems,
        f"checkpoint: must have the tensors of its config, got {file_path}, which "
        f"{', '.join(problems[:3])}{more}; give the checkpoint folder of another run",
    )
    return tensors


def save_draft(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    target: Any,
    seed: int | None,
    config: dict[str, Any],
    metadata: dict[str, str] | None = None,
    write_extra_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a draft's checkpoint: `tensors` in the target's dtype, config, target hashes and seed."""
    dtype = target.head.weight.dtype
    save_checkpoint(
        directory,
        {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()},
        config=config | {"dtype": str(dtype).removeprefix("torch.")},
        metadata={
            TARGET_HASH_KEY: target.fingerprint,
            TOKENIZER_HASH_KEY: target.tokenizer_fingerprint,
            "target_name": target.name,
            **({} if target.revision is None else {"target_revision": target.revision}),
            **({} if seed is None else {"seed": str(seed)}),
            **(metadata or {}),
        },
        write_extra_files=write_extra_files,
    )


def read_origin(directory: Path, target: Any) -> tuple[dict[str, str], int | None]:
    """Return the metadata and the seed of a draft's checkpoint; raise UserError for a different target."""
    metadata = read_metadata(directory)
    check_metadata(metadata, target_hash=target.fingerprint, tokenizer_hash=target.tokenizer_fingerprint)
    return metadata, int(metadata["seed"]) if "seed" in metadata else None


def check_metadata(metadata: Mapping[str, str], *, tokenizer_hash: str, target_hash: str | None = None) -> None:
    """Check that a draft was made for this tokenizer and target; raise UserError otherwise.

    A draft published without hashes passes. Without `target_hash`, the target is not checked.
    """
    for kind, key, expected in (
        ("tokenizer", TOKENIZER_HASH_KEY, tokenizer_hash),
        ("target", TARGET_HASH_KEY, target_hash),
    ):
        stored = metadata.get(key)
        if stored and expected and stored != expected:
            raise UserError(
                f"checkpoint: must be distilled for this {kind} ({expected[:12]}), got one "
                f"distilled for a different {kind} ({stored[:12]}); set target to the model it was "
                "distilled for"
            )


def find_non_finite(model: nn.Module) -> str | None:
    """Return the name of the first weight with a NaN or an infinity, or None if all are finite."""
    return next((name for name, weight in model.named_parameters() if not is_finite(weight)), None)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor of any type has no NaN and no infinity."""
    is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1  # which PyTorch cannot ask
    return bool((tensor.float() if is_fp8 else tensor).isfinite().all())
