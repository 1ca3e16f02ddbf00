"""What a feature store was made of, and the checksum of each of its files.

    outputs/capture/RUN/manifest.json                       by one process
    outputs/capture/RUN/manifest-00001-of-00004.json        by each of four: reading merges them

A file is believed once a manifest has its checksum: it is written whole and renamed, then recorded.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.progress import track

from data.features.schema import Layout
from models.checkpoint import atomic_path
from models.console import CONSOLE
from models.errors import UserError

VERSION = 3
DOCUMENTS = "documents.safetensors"
CHUNK = 1 << 24  # bytes of a file that are read at a time


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a store is made of. Captures that are equal in this write the same files."""

    target_sha256: str
    tokenizer_sha256: str
    computed_in: str  # the target's precision
    layout: Layout
    length: int  # of the rows that the target looked at, in tokens
    overlap: int | None  # of a long document's pieces
    batch: int  # rows at a time
    documents: int
    tokens: int
    supervised: int
    documents_xxh3: str  # of token ids, answer flags and lengths
    shards: int

    def differs(self, other: "Made") -> list[str]:
        """Where another is not the same, in words."""
        ours, theirs = self.flat(), other.flat()
        return [
            f"{name} {theirs[name]} instead of {ours[name]}"
            for name in ours
            if ours[name] != theirs[name]
        ]

    def flat(self) -> dict[str, Any]:
        return vars(self) | self.layout.saved() | {"layout": ""}


@dataclass(frozen=True, kw_only=True)
class File:
    """A file as it was written."""

    bytes: int
    xxh3_128: str
    # of a shard, by what was rounded: root mean square of |x - kept| / |x| by row, and the share of
    # values that became 0
    rounding: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Of the files that one process wrote, or of all."""

    made: Made
    target: str  # its name or path when it was captured
    method: str  # of the draft that it was captured for
    command: str  # that goes on with it, or captures a damaged shard again
    categories: list[str]
    languages: list[str]
    files: dict[str, File] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)  # of each file, of a merged manifest

    def write(self, path: Path) -> None:
        saved = asdict(self)
        del saved["commands"]
        saved["made"]["layout"] = self.made.layout.saved()
        sealed = {"version": VERSION, "xxh3_128": seal(saved)} | saved
        with atomic_path(path) as partial:
            partial.write_text(json.dumps(sealed, indent=1) + "\n")

    @property
    def wanted(self) -> list[str]:
        """Every file of a finished store."""
        return [DOCUMENTS, *map(shard_name, range(self.made.shards))]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def refuse_unfinished(self, folder: Path) -> None:
        missing = [name for name in self.wanted if name not in self.files]
        if missing:
            done = len(self.wanted) - len(missing)
            raise UserError(
                f"data.path: must be a finished store, got {folder} with {done} of "
                f"{len(self.wanted)} files; to go on run `{into(folder, self.command)}`{self._each}"
            )

    @property
    def _each(self) -> str:
        return ", and so each worker" if "workers=" in self.command else ""

    def refuse_damaged(self, folder: Path, *, checksums: bool) -> None:
        for name, found in self.damaged(folder, checksums=checksums):
            raise self.spoilt(folder, name, found)

    def spoilt(self, folder: Path, name: str, found: str) -> UserError:
        return UserError(
            f"data.path: every file must be as it was written, got {folder / name}, which is "
            f"{found}; `{into(folder, self.commands[name])}` writes this file alone again"
        )

    def damaged(self, folder: Path, *, checksums: bool) -> Iterator[tuple[str, str]]:
        """Files that are not as they were written, and what became of each."""
        names = sorted(self.files)
        quiet = not (CONSOLE.is_terminal and checksums)
        for name in track(names, "checksums", console=CONSOLE, disable=quiet):
            if found := damage(folder / name, self.files[name], checksums=checksums):
                yield name, found


def into(folder: Path, command: str) -> str:
    """The command of a capture that goes on in this folder, wherever its store was moved from.

    >>> into(Path("disk/chat"), "python -m data.capture run_name=chat draft=demo")
    'python -m data.capture draft=demo output_dir=disk run_name=chat'
    """
    place = {"output_dir": folder.parent, "run_name": folder.name}
    words = [word for word in shlex.split(command) if word.partition("=")[0] not in place]
    return shlex.join([*words, *(f"{key}={value}" for key, value in place.items())])


def shard_name(number: int) -> str:
    return f"shard-{number:05}.safetensors"


def manifest_name(worker: int, workers: int) -> str:
    return "manifest.json" if workers == 1 else f"manifest-{worker:05}-of-{workers:05}.json"


def read(folder: Path) -> Manifest:
    """All manifests of a store as one. Raises UserError where there is none that can be read."""
    paths = sorted(folder.glob("manifest*.json"))
    if not paths:
        raise UserError(
            f"data.path: must be a feature store, got {folder} without manifest.json; "
            "write one with `python -m data.capture`"
        )
    first, *others = (read_one(path) for path in paths)
    for other in (first, *others):
        if differs := first.made.differs(other.made):
            raise UserError(
                f"data.path: must be a store of one capture, got {folder} of several "
                f"({'; '.join(differs[:3])}); capture it again under another run_name"
            )
        first.files.update(other.files)
        first.commands.update(dict.fromkeys(other.files, other.command))
    return first


def read_one(path: Path) -> Manifest:
    """Of one process. Raises UserError where it cannot be read, or is of another version."""
    try:
        saved = json.loads(path.read_text())
        if (version := saved.pop("version")) != VERSION:
            raise UserError(
                f"data.path: must be a store of version {VERSION}, got version {version} in "
                f"{path}; capture it again, or read it with the release that wrote it"
            )
        if saved.pop("xxh3_128") != seal(saved):
            raise ValueError("its checksum is another")
        layout = Layout.read(saved["made"]["layout"])
        files = {name: File(**file) for name, file in saved["files"].items()}
        return Manifest(
            **saved | {"made": Made(**saved["made"] | {"layout": layout}), "files": files}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"data.path: must have a manifest as it was written, got {path} ({error}); remove it "
            "and capture again, which writes all of its files anew"
        ) from error


def damage(path: Path, file: File, *, checksums: bool) -> str | None:
    """What is wrong with a file; without `checksums` its size alone is looked at."""
    if not path.exists():
        return "missing"
    if (size := path.stat().st_size) != file.bytes:
        what = "truncated" if size < file.bytes else "too long"
        return f"{what}: {size:,} of {file.bytes:,} bytes"
    if checksums and checksum(path) != file.xxh3_128:
        return "changed: its checksum is another"
    return None


def digest(*values: np.ndarray) -> str:
    """Of all bytes of these. Not of cryptography: it finds what disks and copies do."""
    found = xxhash.xxh3_128()
    for value in values:
        found.update(np.ascontiguousarray(value).data)
    return found.hexdigest()


def seal(saved: dict[str, Any]) -> str:
    """The checksum of a manifest, over what it says."""
    return xxhash.xxh3_128_hexdigest(json.dumps(saved).encode())


def checksum(path: Path) -> str:
    """`digest` of a file, as fast as disks read."""
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()
