"""Checkpoints on disk: safetensors and config.json, written whole or not at all, read strictly.

Files are written under a temporary name and renamed, so that a kill leaves the old file or the new
one. The hashes of the target and tokenizer that a draft was distilled for are in the metadata.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import UserError
from models.parallel.dtensor import whole
from models.transformers4_keys import add_older_keys

PARTIAL = ".partial"  # suffix of what is not finished; whatever bears it may be deleted
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TARGET_HASH, TOKENIZER_HASH = "target_sha256", "tokenizer_sha256"

# Not seen in the weights. RoPE is left out: a longer context is still the same target, and its
# settings are spelled differently by different versions of transformers.
_CONFIG_KEYS = (
    "model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "layer_norm_eps", "sliding_window", "num_experts_per_tok",
)  # fmt: skip


def save(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: dict[str, Any],
    metadata: dict[str, str],
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write model.safetensors and config.json; an existing checkpoint stays whole if this fails.

    `beside` writes further files, such as a tokenizer's, into the empty folder that it is given.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if beside is not None:
            with tempfile.TemporaryDirectory(dir=directory, suffix=PARTIAL) as folder:
                beside(Path(folder))
                for file in Path(folder).iterdir():
                    file.replace(directory / file.name)
        with (
            atomic_path(directory / CONFIG) as config_file,
            atomic_path(directory / WEIGHTS) as weights_file,
        ):
            write_config(config_file, config)
            # not save_file: it writes under a name of its own, which a kill would leave behind
            weights_file.write_bytes(
                safetensors.torch.save(whole, metadata={"format": "pt", **metadata})
            )


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a config.json that transformers 4 and 5 read alike."""
    path.write_text(json.dumps(add_older_keys(config), indent=2, sort_keys=True) + "\n")


@contextmanager
def writing(
    directory: Path, *, remedy: str = "free some space or choose another folder"
) -> Iterator[None]:
    """Turn what a disk refuses into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"output_dir: must be a writable folder, got {directory} ({error.strerror}); {remedy}"
        ) from error


@contextmanager
def output_file(name: str) -> Iterator[Path]:
    """The path of a command's `output`, its folder made; what a disk refuses is one line."""
    file = Path(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file
    except OSError as error:
        raise UserError(
            f"output: must be a writable file, got {file} ({error.strerror}); choose another"
        ) from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` at the end, or vanishes if the block raises."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """An empty temporary directory that becomes `path` at the end, or vanishes on an error.

    `path` must be a new name: no system call replaces one full directory by another.
    """
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # left by a kill
    partial.mkdir(parents=True)
    try:
        yield partial
        for entry in [*partial.rglob("*"), partial]:
            _sync(entry)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(directory: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the CPU and as stored.

    `expected` gives names and shapes, and whether values are floats or integers: a state dict, on
    the meta device if need be. Anything missing, unknown or different is a UserError.
    """
    with _reading(directory / WEIGHTS) as file:
        names = set(file.keys())
        problems = [f"misses {name}" for name in sorted(expected.keys() - names)]
        problems += [f"has the unknown {name}" for name in sorted(names - expected.keys())]
        for name in sorted(names & expected.keys()):
            found, wanted = file.get_slice(name).get_shape(), list(expected[name].shape)
            if found != wanted:
                problems.append(f"has {name} of shape {found} instead of {wanted}")
        if problems:
            raise _misfit(directory, problems)
        tensors = {name: file.get_tensor(name) for name in expected}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != expected[name].is_floating_point():
            problems.append(f"has {name} as {tensor.dtype} instead of {expected[name].dtype}")
    if problems:
        raise _misfit(directory, problems)
    return tensors


def _misfit(directory: Path, problems: list[str]) -> UserError:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return UserError(
        f"checkpoint: must have the tensors of its config, got {directory / WEIGHTS}, which "
        f"{', '.join(problems[:3])}{more}; give the checkpoint folder of another run"
    )


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    if not path.exists():
        return UserError(
            f"checkpoint: must be a folder with {path.name}, got {path.parent}; "
            "give the checkpoint folder of a finished run"
        )
    return UserError(
        f"checkpoint: must be a whole file, got {path}, which is truncated or corrupt ({error}); "
        "copy it again or repeat the run"
    )


def read_config(directory: Path) -> dict[str, Any]:
    """What config.json says."""
    path = directory / CONFIG
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def metadata(target: Any) -> dict[str, str]:
    """What ties a draft to the target that it was distilled from."""
    return {
        TARGET_HASH: target.fingerprint,
        TOKENIZER_HASH: target.tokenizer_fingerprint,
        "target_name": target.name,
    }


def read_metadata(directory: Path) -> dict[str, str]:
    """The metadata of model.safetensors, without reading its tensors; none of a sharded one."""
    if not (directory / WEIGHTS).exists() and (directory / f"{WEIGHTS}.index.json").exists():
        return {}
    with _reading(directory / WEIGHTS) as file:
        return file.metadata() or {}


def check_fits(metadata: Mapping[str, str], *, target_hash: str, tokenizer_hash: str) -> None:
    """Refuse a draft of another target or tokenizer. One published without hashes passes."""
    if metadata.get(TOKENIZER_HASH, tokenizer_hash) != tokenizer_hash:
        raise UserError(_other("tokenizer", metadata[TOKENIZER_HASH], tokenizer_hash))
    if metadata.get(TARGET_HASH, target_hash) != target_hash:
        raise UserError(_other("target", metadata[TARGET_HASH], target_hash))


def _other(what: str, found: str, wanted: str) -> str:
    return (
        f"checkpoint: must be distilled for this {what} ({wanted[:12]}), got one "
        f"distilled for another {what} ({found[:12]}); set target to the model it was distilled for"
    )


def target_fingerprint(model) -> str:
    """Hash of what makes a model's outputs: config, and name, shape and 64 values of each weight.

    Values are rounded to bf16, so that a model has one fingerprint in whichever precision it runs.
    """
    config = model.config.get_text_config().to_dict()
    digest = _digest({key: config.get(key) for key in _CONFIG_KEYS})
    for name, weight in model.named_parameters():
        flat = whole(weight.detach()).flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64].contiguous().to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of every value, by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash of which id each token has, and of which are special."""
    vocab, special = sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)
    return _digest([vocab, special]).hexdigest()


def _digest(value: Any):
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode())
