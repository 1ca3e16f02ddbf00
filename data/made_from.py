"""What a prepared folder was made from: the same command goes on with it, another is refused."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from conf.entry import config_yaml
from data.mixture import SourceConf
from data.raw_rows import files
from models.errors import UserError

FILE = "made_from.json"
ANYWHERE = re.compile(  # settings that change nothing in the rows
    r"run_name|output_dir|worker|device\..*"
    r"|answers\.(url|key_env|concurrency|retries|timeout_s|skip_failed|batch)"
)
EDGE = 2**16  # bytes of a file that are compared, at either end


def made_from(conf: Any, sources: dict[str, SourceConf]) -> dict[str, Any]:
    """The settings, and the files that were read, as flat keys."""
    settings = dict(_flat(yaml.safe_load(config_yaml(conf))))
    found = {key: value for key, value in settings.items() if not ANYWHERE.fullmatch(key)}
    for name, source in sources.items():
        path = Path(source.path).expanduser()
        for file in files(path, source.split) or sorted(path.glob("**/*.arrow")):
            found[f"mixture.sources.{name}.path: {file.name}"] = _identity(file)
    return found


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), value)]
    return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}{key}.")]


def _identity(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        read = opened.read(EDGE)
        opened.seek(max(0, size - EDGE))
        read += opened.read(EDGE)
    return f"{size} bytes {hashlib.sha256(read).hexdigest()[:16]}"


def claim(folder: Path, made: dict[str, Any], own: Path) -> None:
    """Begin the folder, or go on with it; `own` is where this process alone writes."""
    own.mkdir(parents=True, exist_ok=True)
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
