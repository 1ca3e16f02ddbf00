"""Progress of a capture: which files of a store are written and which are missing."""

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

from data.features.config import CaptureConf
from data.features.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    StoreSpec,
    read_manifest,
)
from data.features.plan import CapturePlan
from data.packing.documents import Documents
from models.errors import require
from models.files import PARTIAL_SUFFIX

GB = 10**9
log = logging.getLogger(__name__)


class CaptureProgress:
    """The manifest of a store, updated as its files are written.

    Files that an earlier run recorded are kept. Raises UserError if the folder holds a different
    capture.
    """

    def __init__(self, conf: CaptureConf, spec: StoreSpec, documents: Documents, command: str):
        self.conf, self.folder = conf, Path(conf.output_dir) / conf.run_name
        self.partial_dir = (self.folder / MANIFEST_FILE).with_suffix(PARTIAL_SUFFIX)
        self.manifest = Manifest(
            made=spec, target=conf.target.path or conf.target.name, method=conf.draft.method,
            command=command, categories=documents.categories, languages=documents.languages,
        )  # fmt: skip
        self.recorded_spec: StoreSpec | None = None
        if (self.folder / MANIFEST_FILE).exists():
            recorded = read_manifest(self.folder)
            self.recorded_spec = recorded.made
            self._check_same_spec()
            self.manifest.files.update(recorded.files)

    def set_target(self, target_sha256: str) -> None:
        """Record the loaded target's hash; raise UserError if the store has a different one."""
        self.manifest = replace(
            self.manifest, made=replace(self.manifest.made, target_sha256=target_sha256)
        )
        self._check_same_spec()

    def _check_same_spec(self) -> None:
        current, recorded = self.manifest.made, self.recorded_spec or self.manifest.made
        if not current.target_sha256:  # the hash of this run's target is unknown until it is loaded
            recorded = replace(recorded, target_sha256="")
        differences = current.describe_differences(recorded)
        require(
            not differences,
            f"run_name: must name a new store or the same capture, got {self.folder}, which "
            f"has {', '.join(differences[:3])}; choose another run_name",
        )

    def missing_files(self) -> list[str]:
        """Return the names of the files still to be written; log a warning for damaged ones."""
        damaged = dict(self.manifest.find_damaged(self.folder, checksums=self.conf.checksums))
        for name, damage in damaged.items():
            log.warning("%s is %s: capturing it again", self.folder / name, damage)
        return [
            name
            for name in self.manifest.file_names
            if name in damaged or name not in self.manifest.files
        ]

    def check_disk_space(self, plan: CapturePlan) -> None:
        """Raise UserError unless the store fits its budget and the disk.

        Files of the store that exist already count as free space: the plan's bytes include them.
        """
        disk = next(
            path for path in (self.folder, *self.folder.absolute().parents) if path.exists()
        )
        needed, free = plan.total_bytes, shutil.disk_usage(disk).free
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        budget_gb = math.inf if self.conf.budget_gb is None else self.conf.budget_gb
        tokens, supervised = plan.shard_token_counts.sum(0)
        for key, room, value in (
            ("budget_gb", budget_gb * GB, f"{budget_gb:.4g}"),
            ("output_dir", free + written, f"{free / GB:.4g} GB free in {disk}"),
        ):
            require(
                needed <= room,
                f"{key}: must have room for {needed / GB:.4g} GB ({tokens:,} tokens, "
                f"{supervised / tokens:.0%} supervised, dtype={plan.schema.dtype.value} "
                f"teacher={plan.schema.teacher.value}), got {value}; take fewer documents by "
                "data.limit, a smaller dtype or teacher=topk, or choose another output_dir",
            )

    def record(self, name: str, file: FileRecord) -> None:
        """Record the checksum of a written file; the file is valid from now on."""
        self.manifest.files[name] = file
        self.manifest.write(self.folder)
