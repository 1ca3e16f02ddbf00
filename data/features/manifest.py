"""The manifest of a feature store: what it was captured from, and the checksum of each file.

A file is valid once a manifest has its checksum: it is written completely and renamed, then recorded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from data.features.schema import FeatureSchema
from models.drafts.base import Needs
from models.io.console import track_progress
from models.io.errors import UserError, require
from models.io.files import hash_file, write_text_atomically

MANIFEST_VERSION = 4
MANIFEST_FILE = "manifest.json"
DOCUMENTS_FILE = "documents.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """The settings and sizes that determine a store's files, besides target and token ids."""

    tokenizer_sha256: str
    computed_in: str  # the target's precision
    schema: FeatureSchema
    length: int  # tokens of the rows that the target read
    overlap: int | None  # tokens shared by neighboring pieces of a split document
    batch: int  # rows in each pass of the target
    documents: int
    tokens: int
    supervised: int
    documents_xxh3: str  # hash of token ids, answer flags and document starts
    shards: int
    rows_per_shard: int | None = None  # None in older stores


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size and checksum of a written file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a store: the inputs of its capture, and the files written so far."""

    spec: StoreSpec
    target: str  # the target's name or path at the time of the capture
    target_sha256: str = ""  # known once the target is loaded
    tables_sha256: str = ""  # of its embeddings and head; "" in older stores
    method: str  # the draft's method
    command: str  # resumes the capture, and captures damaged shards again
    categories: list[str]
    languages: list[str]
    license: str = ""  # of the rows; empty if it is not recorded
    files: dict[str, FileRecord] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest atomically, with its version."""
        saved = TypeAdapter(Manifest).dump_python(self, mode="json")
        text = json.dumps({"version": MANIFEST_VERSION} | saved, indent=1)
        write_text_atomically(folder / MANIFEST_FILE, text + "\n")

    @property
    def file_names(self) -> list[str]:
        """List every file of a finished store."""
        return [DOCUMENTS_FILE, *map(shard_name, range(self.spec.shards))]

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def resume(self, folder: Path) -> "Manifest":
        """Return this manifest with the files that an earlier run wrote; raise UserError for another capture."""
        if not (folder / MANIFEST_FILE).exists():
            return self
        recorded = read_manifest(folder)
        ours, theirs = ({**vars(m.spec), **vars(m.spec.schema)} for m in (self, recorded))
        differences = [
            f"{name} {getattr(theirs[name], 'value', theirs[name])} instead of {getattr(value, 'value', value)}"
            for name, value in ours.items()
            if name != "schema" and value != theirs[name] and (name, theirs[name]) != ("rows_per_shard", None)
        ]
        require(
            not differences,
            f"run_name: must name a new store or the same capture, got {folder}, which "
            f"has {', '.join(differences[:3])}; choose another run_name",
        )
        hashes = {"target_sha256": recorded.target_sha256, "tables_sha256": recorded.tables_sha256}
        written = recorded if DOCUMENTS_FILE in recorded.files else self  # the labels that the store's documents have
        labels = {"categories": written.categories, "languages": written.languages}
        return replace(self, files=recorded.files, **hashes, **labels)

    def check_serves(
        self,
        folder: Path,
        *,
        needs: Needs,
        tokenizer_hash: str | None = None,
        target_hash: str | None = None,
        hidden_size: int | None = None,
    ) -> None:
        """Raise UserError unless the store is finished, of this target, and holds `needs`; None is not compared."""
        done, total = len(self.files.keys() & set(self.file_names)), len(self.file_names)
        require(
            done == total,
            f"data.path: must be a finished store, got {folder} with {done} of {total} files; "
            f"{self._describe_command(folder)} finishes it",
        )
        schema = self.spec.schema
        for kind, stored, expected in (
            ("tokenizer", self.spec.tokenizer_sha256, tokenizer_hash),
            ("target", f"hidden size {schema.hidden_size}", f"hidden size {hidden_size}" if hidden_size else None),
            ("target", self.target_sha256, target_hash),
        ):
            if expected not in (None, stored):
                raise UserError(  # 18 characters hold a hidden size, or tell hashes apart.
                    f"data.path: must be a store of this {kind} ({expected[:18]}), got {folder} of {self.target} "
                    f"({stored[:18]}); capture again for this {kind} under another run_name"
                )
        missing = schema.describe_missing(needs)
        require(
            missing is None,
            f"data.path: must hold what the draft reads, {missing} in {folder}, captured for "
            f"{self.method}; capture again for this draft under another run_name",
        )

    def check_tables(self, folder: Path, tables_hash: str) -> None:
        """Raise UserError unless embeddings and head are those of the captured target."""
        require(
            self.tables_sha256 == tables_hash,
            f"data.path: must be a store of this target, got {folder} of {self.target}, "
            + (
                "whose embeddings and head are others; capture again under another run_name"
                if self.tables_sha256
                else "which does not record their hash; capture it again, or set measure=true"
            ),
        )

    def check_undamaged(self, folder: Path, *, checksums: bool) -> None:
        """Check every file's size, and its hash if `checksums`; raise UserError for damage."""
        for name, damage in self.find_damaged(folder, checksums=checksums):
            raise self.damaged_error(folder, name, damage)

    def damaged_error(self, folder: Path, name: str, damage: str) -> UserError:
        """Build the error for a damaged file, with the command that rewrites it."""
        return UserError(
            f"data.path: every file must be as it was written, got {folder / name}, which is "
            f"{damage}; {self._describe_command(folder)} rewrites only this file"
        )

    def _describe_command(self, folder: Path) -> str:
        """Return the command that continues the capture, even if the store was moved."""
        return f"`{self.command}` with output_dir={folder.parent} run_name={folder.name}"

    def find_damaged(self, folder: Path, *, checksums: bool) -> Iterator[tuple[str, str]]:
        """Yield the name of each damaged file and a description of its damage."""
        names = sorted(self.files)
        for name in track_progress(names, "checksums") if checksums else names:
            path, file = folder / name, self.files[name]
            size = path.stat().st_size if path.exists() else None
            if size is None:
                yield name, "missing"
            elif size != file.bytes:
                kind = "truncated" if size < file.bytes else "too long"
                yield name, f"{kind}: {size:,} of {file.bytes:,} bytes"
            elif checksums and hash_file(path) != file.xxh3_128:
                yield name, "changed: its checksum differs"


def shard_name(number: int) -> str:
    return f"shard-{number:05}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a store; raise UserError if it is missing, damaged or outdated."""
    path = folder / MANIFEST_FILE
    require(
        path.exists(),
        f"data.path: must be a feature store, got {folder} without {MANIFEST_FILE}; run `python -m data.capture`",
    )
    try:
        saved = json.loads(path.read_text())
        if (version := saved.pop("version")) != MANIFEST_VERSION:
            raise UserError(
                f"data.path: must be a store of version {MANIFEST_VERSION}, got version {version} "
                f"in {path}; capture it again, or read it with the release that wrote it"
            )
        return TypeAdapter(Manifest).validate_python(saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())  # pydantic's has several lines
        raise UserError(
            f"data.path: must have a manifest as it was written, got {path} ({reason}); remove it "
            "and capture again, which rewrites all of its files"
        ) from error
