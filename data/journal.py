"""What is done already: a JSON line a row, appended when the row is finished and never changed.

A process that is killed leaves whole lines and at most one torn one, at the end. It is cut off when
the journal is opened again, so that its row is done once more.
"""

import fcntl
import json
from pathlib import Path
from typing import Any

from models.checkpoint import writing
from models.errors import UserError


class Journal:
    """Records by the id of their row.

    The first line is `made_by`: what later runs must agree with.
    """

    def __init__(self, path: Path, *, made_by: dict[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process
        except BlockingIOError as error:
            self.close()
            raise UserError(
                f"run_name: one process a journal, got another that writes {path}; wait for it, "
                "or give each its own worker"
            ) from error
        self._places: dict[str, int] = {}
        self._end = 0
        try:
            self._find(made_by)
        except UserError:
            self.close()
            raise

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def write(self, row_id: str, record: dict[str, Any]) -> None:
        """Finish a row."""
        self._note(row_id)
        self._append({"id": row_id, **record})

    def read(self, row_id: str) -> dict[str, Any]:
        self._file.seek(self._places[row_id])
        return json.loads(self._file.readline())

    def close(self) -> None:
        self._file.close()

    def _find(self, made_by: dict[str, Any]) -> None:
        """What is there already."""
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(self._end)
                break
            if self._end:
                self._note(json.loads(line)["id"])
            else:
                self._check(line, made_by)
            self._end += len(line)
        if not self._end:
            self._append(made_by)

    def _note(self, row_id: str) -> None:
        self._places[row_id] = self._end

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        with writing(self.path.parent):
            self._file.write(line)
            self._file.flush()
        self._end += len(line)

    def _check(self, line: bytes, made_by: dict[str, Any]) -> None:
        before = json.loads(line)
        for name, value in made_by.items():
            if before[name] != value:
                raise UserError(
                    f"answers.{name}: must be {before[name]} as in the rows that are done, got "
                    f"{value}; take another run_name, or remove {self.path} to begin anew"
                )
