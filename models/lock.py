"""Locks between processes: a file that one process holds, which says who holds it.

The operating system releases a lock when its holder ends, however it ends, so that a killed run
needs no cleaning up. The file itself stays.
"""

import errno
import json
import logging
import os
import shlex
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from models.errors import UserError

log = logging.getLogger(__name__)
NAME = "lock"  # of the file in a run's folder
# What a network file system that has no locks, or has them switched off, answers.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: dict[Path, int] = {}  # descriptors: a lock lasts as long as its file is open


def hold(folder: Path, name: str = NAME, *, patience_s: float = 0.0) -> None:
    """Keep other processes out of a run's folder until this one ends or calls `release`.

    Another holder is given `patience_s` seconds to end; then UserError says who it is. A process
    that holds the folder already keeps it.
    """
    path = (folder / name).resolve()
    if path in _held:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        locked = _lock_within(descriptor, patience_s)
    except OSError as error:  # the file is another user's, for one
        raise UserError(
            f"output_dir: must be a writable folder, got {path} ({error.strerror}); choose "
            "another output_dir or run_name"
        ) from error
    if not locked:
        os.close(descriptor)
        holder = path.read_text().strip() or "another process"
        raise UserError(
            f"run_name: must name a folder that no other process writes, got {folder}, held by "
            f"{holder}; wait until it ends, or choose another run_name"
        )
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{_describe_holder()}\n".encode())
    _held[path] = descriptor


def _lock_within(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    if patience_s and not try_lock(descriptor):
        log.info("another process holds the run's folder: waiting up to %.0f s", patience_s)
    while not (locked := try_lock(descriptor)) and time.monotonic() < deadline:
        time.sleep(min(1.0, patience_s))
    return locked


def release(folder: Path, name: str = NAME) -> None:
    """Let other processes into a folder; harmless where this process does not hold it."""
    descriptor = _held.pop((folder / name).resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def try_lock(file: IO | int) -> bool:
    """Lock an open file, or return False where another process has it.

    Where the file system has no locks the reader is warned, and the file counts as locked.
    """
    import fcntl  # not on Windows, where commands refuse to run before they come here

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning(
            "the run's folder cannot be locked on this file system (%s): start no second run there",
            error.strerror,
        )
    return True


def wait_for_lock(file: IO, *, alone: bool) -> None:
    """Lock an open file, for this process alone or shared, as soon as others allow it."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def _forget_locks() -> None:
    """Close what a forked child inherits, or it would hold its parent's locks after the parent."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_locks)


def _describe_holder() -> str:
    """Host, process, time and command, in one line."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    command = json.dumps(shlex.join(sys.orig_argv))
    return f"process {os.getpid()} on {socket.gethostname()} since {since} with {command}"
