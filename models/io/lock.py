"""Locks between processes: a file that one process holds and that names its holder.

The operating system releases a lock when its holder ends for any reason; the file itself stays.
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

from models.io.console import IS_MAIN_PROCESS
from models.io.errors import UserError
from models.io.files import prepare_folder, report_disk_errors

log = logging.getLogger(__name__)
LOCK_FILE = "lock"  # name of the lock file in a run's folder
# Errors of network file systems that have no locks, or have them switched off.
UNSUPPORTED_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held_locks: dict[Path, int] = {}  # descriptors: a lock lasts as long as its file is open


def claim_run_folder(folder: Path) -> None:
    """Create and lock a run's folder on the main process; raise UserError if it is not writable or in use."""
    if not IS_MAIN_PROCESS:
        return
    prepare_folder(folder)
    acquire_lock(folder)


def acquire_lock(folder: Path, name: str = LOCK_FILE, *, timeout_s: float = 0.0, key: str = "run_name") -> None:
    """Lock the folder that `key` names for this process until it ends or calls `release_lock`.

    Wait up to `timeout_s` seconds for another holder, then raise UserError with its name. Do
    nothing if this process holds the lock already.
    """
    path = (folder / name).resolve()
    if path in _held_locks:
        return
    with report_disk_errors(path, remedy="choose another output_dir or run_name"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        locked = _lock_within(descriptor, path, timeout_s)
    if not locked:
        os.close(descriptor)
        holder = path.read_text().strip() or "another process"
        raise UserError(
            f"{key}: must name a folder that no other process writes, got {folder}, held by "
            f"{holder}; wait until it ends, or choose another {key}"
        )
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{_describe_holder()}\n".encode())
    _held_locks[path] = descriptor


def _lock_within(descriptor: int, path: Path, timeout_s: float) -> bool:
    """Retry `try_lock` for up to `timeout_s` seconds; return whether the file is locked."""
    deadline = time.monotonic() + timeout_s
    if timeout_s and not try_lock(descriptor):
        log.info("another process holds %s: waiting up to %.0f s", path, timeout_s)
    while not (locked := try_lock(descriptor)) and time.monotonic() < deadline:
        time.sleep(min(1.0, timeout_s))
    return locked


def release_lock(folder: Path, name: str = LOCK_FILE) -> None:
    """Release the lock of a folder; do nothing if this process does not hold it."""
    if (descriptor := _held_locks.pop((folder / name).resolve(), None)) is not None:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file and return True, or return False if another process holds its lock.

    If the file system has no locks, log a warning and treat the file as locked.
    """
    import fcntl  # missing on Windows, but there commands stop before they get here

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED_ERRNOS:
            raise
        log.warning(
            "the run's folder cannot be locked on this file system (%s): do not start a second run there",
            error.strerror,
        )
    return True


def _forget_locks() -> None:
    """Close the descriptors that a forked child inherits: else it would hold its parent's locks."""
    while _held_locks:
        os.close(_held_locks.popitem()[1])


if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=_forget_locks)


def _describe_holder() -> str:
    """Return process, host, time and command of this process, in one line."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    command = json.dumps(shlex.join(sys.orig_argv))
    return f"process {os.getpid()} on {socket.gethostname()} since {since} with {command}"
