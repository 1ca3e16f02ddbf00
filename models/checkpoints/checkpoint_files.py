"""Read config.json and the metadata of the weights of a checkpoint, without PyTorch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from models.io.errors import UserError

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
TARGET_HASH_KEY, TOKENIZER_HASH_KEY = "target_sha256", "tokenizer_sha256"


@contextmanager
def report_unreadable(path: Path) -> Iterator[None]:
    """Turn an error that the block raises for a missing or corrupt file into a UserError."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if not path.exists():
            raise UserError(
                f"checkpoint: must be a folder with {path.name}, got {path.parent}; "
                "give the checkpoint folder of a finished run"
            ) from error
        raise UserError(
            f"checkpoint: must be a complete file, got {path}, which is truncated or corrupt "
            f"({error}); copy it again or repeat the run"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json; raise UserError if it is missing or corrupt."""
    path = directory / CONFIG_FILE
    with report_unreadable(path):
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return config


def read_metadata(directory: Path) -> dict[str, str]:
    """Return the metadata of model.safetensors; a sharded checkpoint has none."""
    path = directory / WEIGHTS_FILE
    if not path.exists() and path.with_name(f"{WEIGHTS_FILE}.index.json").exists():
        return {}
    with report_unreadable(path), safe_open(path, framework="np") as file:
        return file.metadata() or {}
