"""Weights stored in one file per rank: what other rooms call of the route that writes them."""

from models.device.xla.nxd_checkpoint import find_rank_files, load_rank_files

__all__ = ["find_rank_files", "load_rank_files"]
