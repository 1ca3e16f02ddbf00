"""What one process has finished of a store, and what is left for it to do.

Shard n is of worker n modulo the number of workers; the documents are of the first. Nobody writes
what is another's, so that workers need nothing of each other.
"""

import logging
from dataclasses import replace
from pathlib import Path

from data.features import manifest as store_manifest
from data.features.config import CaptureConf
from data.features.manifest import DOCUMENTS, File, Made, Manifest, manifest_name, shard_name
from data.packing.documents import Documents
from models.errors import UserError

log = logging.getLogger(__name__)


class Book:
    """The manifest of this process."""

    def __init__(self, conf: CaptureConf, made: Made, documents: Documents, command: str):
        self.conf, self.folder = conf, Path(conf.output_dir) / conf.run_name
        self.path = self.folder / manifest_name(conf.worker, conf.workers)
        self.manifest = Manifest(
            made=made, target=conf.target.path or conf.target.name, method=conf.draft.method,
            command=command, categories=documents.categories, languages=documents.languages,
        )  # fmt: skip
        self.target_sha256 = self._go_on()

    def _go_on(self) -> str | None:
        """Take over what is recorded, and of which target: UserError where of another capture."""
        workers, target = self.conf.workers, None
        names = [manifest_name(worker, workers) for worker in range(workers)]
        for path in sorted(self.folder.glob("manifest*.json")):
            if path.name not in names:
                raise UserError(
                    f"workers: must be as the store was begun, got {workers} beside {path}; "
                    "choose another run_name"
                )
            found = store_manifest.read_one(path)
            target = found.made.target_sha256
            # of our own target nothing but the name is known until it is loaded
            self._refuse(replace(found.made, target_sha256=""))
            if path == self.path:
                self.manifest.files.update(found.files)
        return target

    def begin(self, target_sha256: str) -> None:
        """The target is known now. Raises UserError where the store was begun with another."""
        made = replace(self.manifest.made, target_sha256=target_sha256)
        if self.target_sha256 is not None:
            self._refuse(replace(made, target_sha256=self.target_sha256), made)
        self.manifest = replace(self.manifest, made=made)

    def _refuse(self, found: Made, made: Made | None = None) -> None:
        if differs := (made or self.manifest.made).differs(found):
            raise UserError(
                f"run_name: must name a new store or the same capture, got {self.folder}, which "
                f"has {', '.join(differs[:3])}; choose another run_name"
            )

    def missing(self) -> list[str]:
        """Files of this process that are not there as they were written."""
        numbers = range(self.conf.worker, self.manifest.made.shards, self.conf.workers)
        own = [DOCUMENTS] * (self.conf.worker == 0) + [shard_name(number) for number in numbers]
        damaged = dict(self.manifest.damaged(self.folder, checksums=self.conf.checksums))
        for name, found in damaged.items():
            log.warning("%s is %s: it is captured again", self.folder / name, found)
        return [name for name in own if name in damaged or name not in self.manifest.files]

    def bytes_there(self) -> int:
        """Of the store's files by any process."""
        paths = [self.folder / name for name in self.manifest.wanted]
        return sum(path.stat().st_size for path in paths if path.exists())

    def record(self, name: str, file: File) -> None:
        """From here on the file is believed."""
        self.manifest.files[name] = file
        self.manifest.write(self.path)
