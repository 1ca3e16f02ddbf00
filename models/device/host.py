"""What the operating system tells of this machine: Neuron devices, instance type, file systems."""

from dataclasses import dataclass
from pathlib import Path

# Types of /proc/mounts whose files other machines see too; EFS is nfs4, FSx is lustre or nfs4.
SHARED = {"nfs", "nfs4", "efs", "lustre", "cifs", "smb3", "ceph", "glusterfs", "fuse.glusterfs"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Read from files below `root`."""

    root: Path = Path("/")

    @property
    def has_neuron(self) -> bool:
        """Whether the Neuron driver offers a device; a container may have any of them."""
        return any((self.root / "dev").glob("neuron[0-9]*"))

    @property
    def instance(self) -> str | None:
        """EC2's instance type, such as trn2.48xlarge."""
        file = self.root / "sys/devices/virtual/dmi/id/product_name"
        name = file.read_text().strip() if file.exists() else ""
        return name if name.startswith(("trn", "inf")) else None

    def shared(self, folder: Path) -> str | None:
        """Type of the network file system that holds a folder, None where it is this host's own."""
        folder = folder.expanduser().resolve()
        kind, nearest = "", -1
        for line in (self.root / "proc/mounts").read_text().splitlines():
            _, place, mounted, *_ = line.split()
            depth = len(Path(place).parts)
            if folder.is_relative_to(place) and depth >= nearest:  # a later mount hides an earlier
                kind, nearest = mounted, depth
        return kind if kind in SHARED else None
