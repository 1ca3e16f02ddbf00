"""Files written atomically (a kill leaves the old file or the new one), and errors of the disk in one line."""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from models.io.errors import UserError

PARTIAL_SUFFIX = ".partial"  # suffix of unfinished files and folders, which may be deleted


@contextmanager
def report_disk_errors(
    path: Path, *, rule: str = "output_dir: must be a writable folder", remedy: str | None = None
) -> Iterator[None]:
    """Turn an OSError that the block raises into a one-line UserError about `path`."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = remedy or ("free some space or choose another folder" if is_full else "choose another folder")
        raise UserError(f"{rule}, got {path} ({error.strerror or error}); {remedy}") from error


def prepare_folder(folder: Path) -> None:
    """Create a folder if it is missing; raise UserError if nothing can be written there."""
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def open_output_file(name: str) -> Iterator[Path]:
    """Create the folder of a command's `output` and yield its path; turn OSError into UserError."""
    file = Path(name)
    with report_disk_errors(file, rule="output: must be a writable file", remedy="choose another"):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file


def add_partial_suffix(path: Path) -> Path:
    """Return the name beside a path under which its file or folder is written."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


@contextmanager
def atomic_path(path: Path, *, partial_dir: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` at the end, or is deleted if the block raises.

    The temporary path lies beside `path`, or in `partial_dir`. If several processes may write
    `path` at the same time, each needs a `partial_dir` of its own, on the same disk.
    """
    partial = add_partial_suffix((partial_dir or path.parent) / path.name)
    try:
        yield partial
        _sync_to_disk(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_to_disk(path.parent)


@contextmanager
def partial_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory, and delete it unless it was renamed; what a kill leaves is deleted by the next call."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_directory(path: Path, *, own_partial: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary directory that becomes `path` at the end, or is deleted on an error.

    `path` must be a new name: no system call replaces a directory that has files in it. If several processes may write
    `path` at the same time, each needs an `own_partial` on the same disk, and the first one's becomes `path`.
    """
    with partial_directory(own_partial or add_partial_suffix(path)) as partial:
        yield partial
        for entry in [*partial.rglob("*"), partial]:
            _sync_to_disk(entry)
        try:
            partial.rename(path)
        except OSError:
            if own_partial is None or not path.exists():
                raise
    _sync_to_disk(path.parent)


def write_text_atomically(path: Path, text: str, *, partial_dir: Path | None = None) -> None:
    """Replace a text file at once; `partial_dir` is that of `atomic_path`."""
    with atomic_path(path, partial_dir=partial_dir) as partial:
        partial.write_text(text, encoding="utf-8")


def _sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return a file's XXH3-128 hash, which is computed as fast as disks read."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
