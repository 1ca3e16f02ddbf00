"""A journal of finished rows: one JSON line per row, appended once and never changed.

A killed process leaves complete lines and at most one torn line at the end. Opening the journal
again removes the torn line, so its row is answered again.
"""

import json
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.files import report_disk_errors
from models.lock import try_lock


class Journal:
    """An append-only file of records by row id, locked: one process at a time may open it."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        if not try_lock(self._file):
            self.close()
            raise UserError(
                f"run_name: must have one process per worker, got another that writes {path}; "
                "wait until it ends, or give each process its own worker"
            )
        self.offsets: dict[str, int] = {}  # where the line of each finished row begins
        self._end = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):  # torn by a kill
                self._file.truncate(self._end)
                break
            try:
                self.offsets[json.loads(line)["id"]] = self._end
            except ValueError as error:
                self.close()
                raise UserError(
                    f"{path}: each line must be a row's answers, got damage {self._end} bytes "
                    "from its start; delete that line to have its row answered again"
                ) from error
            self._end += len(line)

    def write(self, row_id: str, record: dict[str, Any]) -> None:
        """Append the record of a finished row."""
        line = json.dumps({"id": row_id, **record}).encode() + b"\n"
        with report_disk_errors(self.path.parent):
            self._file.write(line)
            self._file.flush()
        self.offsets[row_id] = self._end
        self._end += len(line)

    def read(self, row_id: str) -> dict[str, Any]:
        """Read the record of a row."""
        self._file.seek(self.offsets[row_id])
        return json.loads(self._file.readline())

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self._file.close()
