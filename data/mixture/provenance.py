"""What a prepared folder was made from: the same command goes on with it, another is refused."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from conf.entry import config_yaml
from data.config import DEMO
from data.mixture.config import MixtureConf
from data.sources.files import files, first_line
from models import lock
from models.errors import UserError

FILE = "made_from.json"
EXCLUDED = "test"  # the split of a directory of prompts that is read, as of prompt_files
ANYWHERE = re.compile(  # settings that change nothing in the rows
    r"run_name|output_dir|worker|device\..*"
    r"|answers\.(url|key_env|concurrency|retries|timeout_s|skip_failed|batch)"
)
EDGE = 2**16  # bytes of a file that are compared, at either end


def made_from(conf: Any, mixture: MixtureConf) -> dict[str, Any]:
    """The settings, and the files that are read, as flat keys.

    Raises UserError for a file that cannot be read.
    """
    settings = dict(_flat(yaml.safe_load(config_yaml(conf))))
    found = {key: value for key, value in settings.items() if not ANYWHERE.fullmatch(key)}
    read = [(f"mixture.exclude[{n}]", file, EXCLUDED) for n, file in enumerate(mixture.exclude)]
    for name, source in mixture.sources.items():
        read.append((f"mixture.sources.{name}.path", source.path, source.split))
    for key, path, split in (each for each in read if each[1] != DEMO):
        try:
            found |= {f"{key}: {name}": said for name, said in _identities(path, split)}
        except (OSError, RuntimeError) as error:  # a home that is nobody's, for one
            raise UserError(
                f"{key}: must be readable, got {path} ({first_line(error)}); check the path"
            ) from error
    return found


def _identities(source: str, split: str) -> Iterator[tuple[str, str]]:
    """Each file of a local source: those that are read, or all of a data set's."""
    path = Path(source).expanduser()
    beneath = (file for file in path.rglob("*") if file.is_file())
    for file in files(path, split) or ([path] if path.is_file() else sorted(beneath)):
        size = file.stat().st_size
        with file.open("rb") as opened:
            read = opened.read(EDGE)
            opened.seek(max(0, size - EDGE))
            read += opened.read(EDGE)
        name = str(file.relative_to(path.parent))
        yield name, f"{size} bytes {hashlib.sha256(read).hexdigest()[:16]}"


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), value)]
    return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}{key}.")]


def claim(folder: Path, made: dict[str, Any], own: Path) -> None:
    """Begin the folder, or go on with it; `own` is where this process alone writes."""
    own.mkdir(parents=True, exist_ok=True)
    lock.hold(own)
    noted = folder / FILE
    if not noted.exists():
        mine = own / FILE
        mine.write_text(json.dumps(made, indent=1))
        mine.replace(noted)
    check_claim(folder, made)  # another process may have been the last to write


def check_claim(folder: Path, made: dict[str, Any]) -> None:
    """Raises UserError where the folder was made from something else."""
    noted = folder / FILE
    if not noted.exists():
        return
    before = json.loads(noted.read_text())
    for key in {**before, **made}:
        if before.get(key) != made.get(key):
            raise UserError(
                f"{key}: must be {before.get(key)} as in {folder}, got {made.get(key)}; "
                "choose another run_name, or remove the folder"
            )


def release(own: Path) -> None:
    """Remove what this process alone has written."""
    shutil.rmtree(own, ignore_errors=True)
    lock.release(own)
    with suppress(OSError):  # other workers are at work
        own.parent.rmdir()


def forget(folder: Path, own: Path) -> None:
    """Leave no trace where nothing was made, so that the name is free for other settings."""
    if any(folder.glob("*.parquet")) or any(own.glob("answers.*")):
        return
    release(own)
    if not own.parent.exists():
        (folder / FILE).unlink(missing_ok=True)
        (folder / "config.yaml").unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            folder.rmdir()
