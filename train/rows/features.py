"""The target's features of training rows: computed in each step, kept in memory, or stored."""

import logging

import psutil
import torch
from torch import Tensor

from data.features.reader import FeatureStore
from data.features.target_pass import build_target_pass
from data.packing.documents import Packed
from models.batch import Batch
from models.io.console import track_progress
from models.io.errors import require
from models.parallel import torchrun
from models.targets.language_model import TargetOutput
from models.targets.target import Target

log = logging.getLogger(__name__)


class TargetFeatures:
    """The target's features of rows: read from a store, kept in memory, or computed in each step.

    In memory, every process keeps the features of all rows: each epoch deals the rows anew.
    """

    def __init__(
        self, target: Target, rows: Packed, layers: list[int], *, store: FeatureStore | None, compiled: bool = False
    ):
        self.target, self.rows, self.layers, self.store = target, rows, layers, store
        self._pass = build_target_pass(target, compiled=compiled)
        self.cached: TargetOutput | None = None

    @property
    def are_kept(self) -> bool:
        """Return whether the features of all rows are stored or in memory."""
        return self.store is not None or self.cached is not None

    def look_up(self, row_numbers: list[int]) -> TargetOutput:
        """Return the kept features of these rows, on the host."""
        if self.store is not None:
            return self.store.read_target_output(self.rows.pieces(row_numbers), self.rows.length)
        assert self.cached is not None
        return self.cached.map_tensors(lambda tensor: tensor[row_numbers])

    @torch.no_grad()
    def compute_features(self, batch: Batch) -> TargetOutput:
        """Return the target's features of a batch; a graph of PyTorch/XLA bears the name of this function."""
        return self._pass(self.target, self.layers, batch)

    def keep_all(self, batch_size: int) -> None:
        """Compute the features of all rows and keep them in host memory.

        The groups do not depend on the step that a run continues from, so that sums round alike.
        Raise UserError if the machine lacks the memory.
        """
        device, num_rows = self.target.device.torch_device, len(self.rows)
        compute = self.target.device.compile_if_lazy(self.compute_features)
        groups = torch.arange(num_rows).split(batch_size)
        for group in track_progress(groups, "features"):
            # The last group is filled up from the first rows: one size, so one graph.
            group_rows = (group[0] + torch.arange(batch_size)) % num_rows
            target_output = compute(self.rows.batch(group_rows.tolist()).to(device))
            if self.cached is None:
                self.cached = _allocate_features(target_output, num_rows)
            for stored, new in zip(_list_tensors(self.cached), _list_tensors(target_output), strict=True):
                stored[group] = new.cpu()[: len(group)]


def _list_tensors(target_output: TargetOutput) -> list[Tensor]:
    tensors = (target_output.hidden, target_output.captured)
    return [tensor for tensor in tensors if tensor is not None]


def _allocate_features(example: TargetOutput, num_rows: int) -> TargetOutput:
    """Return empty tensors for all rows; raise UserError if the machine lacks the memory for those of its processes."""
    needed = sum(num_rows * tensor[0].nbytes for tensor in _list_tensors(example)) * torchrun.get_local_world_size()
    free = psutil.virtual_memory().available
    require(
        needed <= free // 2,
        f"data.keep_features: must fit in half of the free memory, got {needed / 1e9:.1f} GB "
        f"of features and {free / 1e9:.1f} GB free; set data.keep_features=false",
    )
    log.info("features: %.2f GB of the target's features are kept for all epochs", needed / 1e9)
    return example.map_tensors(lambda tensor: torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype))
