"""Read weights that are stored in one file per rank, for rooms that may not name the XLA route."""

from models.device.xla.nxd_checkpoint import find_rank_files, load_rank_files

__all__ = ["find_rank_files", "load_rank_files"]
