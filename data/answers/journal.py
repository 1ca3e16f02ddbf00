"""What is done already: a JSON line a row, appended when the row is finished and never changed.

A process that is killed leaves whole lines and at most one torn one, at the end. It is cut off when
the journal is opened again, so that its row is done once more.
"""

import json
from pathlib import Path
from typing import Any

from models.checkpoint import writing
from models.errors import UserError
from models.lock import try_lock


class Journal:
    """Records by the id of their row."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        if not try_lock(self._file):
            self.close()
            raise UserError(
                f"run_name: one process a journal, got another that writes {path}; wait for it, "
                "or give each its own worker"
            )
        self._places: dict[str, int] = {}
        self._end = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(self._end)
                break
            self._places[self._id(line)] = self._end
            self._end += len(line)

    def _id(self, line: bytes) -> str:
        try:
            return json.loads(line)["id"]
        except ValueError as error:
            self.close()
            raise UserError(
                f"{self.path}: each line must be a row's answers, got damage {self._end} bytes "
                "from its start; delete that line, its row is answered again"
            ) from error

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def write(self, row_id: str, record: dict[str, Any]) -> None:
        """Finish a row."""
        line = json.dumps({"id": row_id, **record}).encode() + b"\n"
        with writing(self.path.parent):
            self._file.write(line)
            self._file.flush()
        self._places[row_id] = self._end
        self._end += len(line)

    def read(self, row_id: str) -> dict[str, Any]:
        self._file.seek(self._places[row_id])
        return json.loads(self._file.readline())

    def close(self) -> None:
        self._file.close()
