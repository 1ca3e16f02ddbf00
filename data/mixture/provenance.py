"""Provenance of a prepared folder: the same command resumes it, and any other is rejected."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from conf.entry import config_to_yaml
from data.config import DEMO
from data.mixture.config import MixtureConf
from data.sources.files import first_line
from data.sources.open_rows import list_source_files
from data.sources.prepared_rows import PREPARED_VERSION
from models import lock
from models.errors import UserError, require
from models.files import write_text_atomically

PROVENANCE_FILE = "made_from.json"
EXCLUDED_SPLIT = "test"  # split of a prompt directory, as data/sources/prompt_formats.py reads it
IGNORED_SETTINGS = re.compile(  # settings that do not affect the rows
    r"run_name|output_dir|worker|device\..*|log\..*"
    r"|answers\.(url|api_key_env|concurrency|retries|timeout_s|skip_failed|batch)"
)
EDGE_BYTES = 2**16  # bytes hashed at each end of a file


def collect_provenance(conf: Any, mixture: MixtureConf) -> dict[str, Any]:
    """Return the settings and a fingerprint of every input file under flat keys.

    Raises UserError for a file that cannot be read.
    """
    provenance = {
        key: value
        for key, value in _flatten_keys(yaml.safe_load(config_to_yaml(conf)))
        if not IGNORED_SETTINGS.fullmatch(key)
    }
    inputs = [
        *(
            (f"mixture.exclude[{n}]", file, EXCLUDED_SPLIT)
            for n, file in enumerate(mixture.exclude)
        ),
        *(
            (f"mixture.sources.{name}.path", source.path, source.split)
            for name, source in mixture.sources.items()
        ),
    ]
    for key, path, split in (entry for entry in inputs if entry[1] != DEMO):
        try:
            provenance |= {
                f"{key}: {name}": fingerprint
                for name, fingerprint in _iter_file_hashes(path, split)
            }
        except OSError as error:
            raise UserError(
                f"{key}: must be readable, got {path} ({first_line(error)}); check the path"
            ) from error
    return provenance


def _iter_file_hashes(source: str, split: str) -> Iterator[tuple[str, str]]:
    """Yield the name and fingerprint of each file that a local source reads."""
    for file in list_source_files(source, split):
        size = file.stat().st_size
        with file.open("rb") as stream:
            edges = stream.read(EDGE_BYTES)
            stream.seek(max(0, size - EDGE_BYTES))
            edges += stream.read(EDGE_BYTES)
        fingerprint = f"{size} bytes {hashlib.sha256(edges).hexdigest()[:16]}"
        yield str(file.relative_to(Path(source).parent)), fingerprint


def _flatten_keys(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), value)]
    return [pair for key, part in value.items() for pair in _flatten_keys(part, f"{prefix}{key}.")]


def claim_folder(folder: Path, provenance: dict[str, Any], worker_dir: Path) -> None:
    """Lock `worker_dir`, which only this process writes, and record the folder's provenance.

    Raises UserError if the folder has a different provenance.
    """
    worker_dir.mkdir(parents=True, exist_ok=True)
    lock.acquire_lock(worker_dir)
    file = folder / PROVENANCE_FILE
    if not file.exists():
        content = json.dumps({"version": PREPARED_VERSION} | provenance, indent=1)
        write_text_atomically(file, content, partial_dir=worker_dir)
    check_provenance(folder, provenance)  # another process may have been the last to write


def check_provenance(folder: Path, provenance: dict[str, Any]) -> None:
    """Check that the folder was made from the same inputs; raise UserError otherwise."""
    file = folder / PROVENANCE_FILE
    if not file.exists():
        return
    recorded = json.loads(file.read_text())
    version = recorded.pop("version", 1)
    require(
        version == PREPARED_VERSION,
        f"run_name: must name a folder of version {PREPARED_VERSION}, got version {version} in "
        f"{folder}; choose another run_name, or remove the folder",
    )
    for key in {**recorded, **provenance}:
        require(
            recorded.get(key) == provenance.get(key),
            f"{key}: must be {recorded.get(key)} as in {folder}, got {provenance.get(key)}; "
            "choose another run_name, or remove the folder",
        )


def release_worker_dir(worker_dir: Path) -> None:
    """Remove this process's working directory and release its lock."""
    shutil.rmtree(worker_dir, ignore_errors=True)
    lock.release_lock(worker_dir)
    with suppress(OSError):  # other workers still use the parent
        worker_dir.parent.rmdir()


def discard_empty_folder(folder: Path, worker_dir: Path) -> None:
    """Remove a folder without results, so that its name is free for other settings."""
    if any(folder.glob("*.parquet")) or any(worker_dir.glob("answers.*")):
        return
    release_worker_dir(worker_dir)
    if not worker_dir.parent.exists():
        for name in (PROVENANCE_FILE, "config.yaml"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # the folder holds other files
            folder.rmdir()
