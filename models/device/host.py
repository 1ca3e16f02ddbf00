"""Facts about this machine from its operating system: devices, instance type, file systems."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Types in /proc/mounts whose files several machines share; EFS is nfs4, FSx is lustre or nfs4.
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "efs", "lustre", "cifs", "smb3", "ceph", "glusterfs", "fuse.glusterfs"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine that this process runs on, as the files below `root` describe it."""

    root: Path = Path("/")

    @property
    def has_neuron(self) -> bool:
        """Return whether there is a Neuron device; a container may have any subset of them."""
        return any((self.root / "dev").glob("neuron[0-9]*"))

    @property
    def instance_type(self) -> str | None:
        """Return the EC2 instance type, such as trn2.48xlarge, if it is Trainium or Inferentia."""
        file = self.root / "sys/devices/virtual/dmi/id/product_name"
        name = file.read_text().strip() if file.exists() else ""
        return name if name.startswith(("trn", "inf")) else None

    def list_memory_limits(self) -> list[int]:
        """Return the limits in bytes of the control groups that hold this process, outer ones too.

        A container sees its own group as the root. /proc/self/cgroup has lines NUMBER:KINDS:GROUP,
        without kinds in version 2.
        """
        file, limits = self.root / "proc/self/cgroup", []
        for line in file.read_text().splitlines() if file.exists() else []:
            _, kinds, group = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            folder = self.root / "sys/fs/cgroup" / ("memory" if kinds else "")
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            for place in [PurePosixPath(group), *PurePosixPath(group).parents]:
                limit = folder / str(place).lstrip("/") / name
                text = limit.read_text().strip() if limit.exists() else "max"
                limits += [int(text)] if text != "max" else []
        return limits

    def network_filesystem(self, folder: Path) -> str | None:
        """Return the type of the network file system that holds a folder; None if it is local."""
        folder = folder.expanduser().resolve()
        lines = (self.root / "proc/mounts").read_text().splitlines()
        mounts = [("/", ""), *(line.split()[1:3] for line in lines)]
        holding = [(Path(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
        # The deepest mount point holds the folder. `max` returns the first of several that are
        # equal, and reversed order puts the latest mount, which hides the earlier ones, first.
        _, kind = max(reversed(holding), key=lambda mount: len(mount[0].parts))
        return kind if kind in NETWORK_FILESYSTEMS else None
