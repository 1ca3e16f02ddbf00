"""Progress of one capture process: which files of a store it has written and which are missing.

Worker n writes the shards whose number is n modulo the number of workers; worker 0 also writes the
documents. No worker writes another's files, so workers need no coordination.
"""

import logging
from dataclasses import replace
from pathlib import Path

from data.features import manifest as store_manifest
from data.features.config import CaptureConf
from data.features.manifest import (
    DOCUMENTS_FILE,
    FileRecord,
    Manifest,
    StoreSpec,
    manifest_name,
    shard_name,
)
from data.packing.documents import Documents
from models.errors import UserError

log = logging.getLogger(__name__)


class CaptureProgress:
    """The manifest of one process, updated as its files are written."""

    def __init__(self, conf: CaptureConf, spec: StoreSpec, documents: Documents, command: str):
        self.conf, self.folder = conf, Path(conf.output_dir) / conf.run_name
        self.path = self.folder / manifest_name(conf.worker, conf.workers)
        self.manifest = Manifest(
            made=spec, target=conf.target.path or conf.target.name, method=conf.draft.method,
            command=command, categories=documents.categories, languages=documents.languages,
        )  # fmt: skip
        self.target_sha256 = self._resume()

    def _resume(self) -> str | None:
        """Load the recorded files and return the hash of their target, or None if it is unknown.

        Raise UserError if the folder holds another capture.
        """
        workers, target = self.conf.workers, None
        names = [manifest_name(worker, workers) for worker in range(workers)]
        for path in sorted(self.folder.glob("manifest*.json")):
            if path.name not in names:
                raise UserError(
                    "workers: must be the number that the store was begun with, got "
                    f"{workers} beside {path}; "
                    "choose another run_name"
                )
            manifest = store_manifest.read_worker_manifest(path)
            target = manifest.made.target_sha256
            # the hash of this run's target is unknown until it is loaded
            self._check_same_spec(replace(manifest.made, target_sha256=""))
            if path == self.path:
                self.manifest.files.update(manifest.files)
        return target

    def set_target(self, target_sha256: str) -> None:
        """Record the loaded target's hash; raise UserError where the store has another target."""
        spec = replace(self.manifest.made, target_sha256=target_sha256)
        if self.target_sha256 is not None:
            self._check_same_spec(replace(spec, target_sha256=self.target_sha256), spec)
        self.manifest = replace(self.manifest, made=spec)

    def _check_same_spec(self, recorded: StoreSpec, current: StoreSpec | None = None) -> None:
        if differences := (current or self.manifest.made).describe_differences(recorded):
            raise UserError(
                f"run_name: must name a new store or the same capture, got {self.folder}, which "
                f"has {', '.join(differences[:3])}; choose another run_name"
            )

    def missing_files(self) -> list[str]:
        """List the files that this process still has to write; warn of damaged ones."""
        shards = range(self.conf.worker, self.manifest.made.shards, self.conf.workers)
        names = [DOCUMENTS_FILE] * (self.conf.worker == 0) + [shard_name(shard) for shard in shards]
        damaged = dict(self.manifest.find_damaged(self.folder, checksums=self.conf.checksums))
        for name, damage in damaged.items():
            log.warning("%s is %s: capturing it again", self.folder / name, damage)
        return [name for name in names if name in damaged or name not in self.manifest.files]

    def bytes_on_disk(self) -> int:
        """Return the bytes on disk of the store's files, whichever process wrote them."""
        paths = [self.folder / name for name in self.manifest.file_names]
        return sum(path.stat().st_size for path in paths if path.exists())

    def record(self, name: str, file: FileRecord) -> None:
        """Record the checksum of a written file; the file is valid from now on."""
        self.manifest.files[name] = file
        self.manifest.write(self.path)
