"""The target's features of training rows: computed in each step, kept in memory, or stored."""

import logging

import psutil
import torch
from rich.progress import track

from data.features.reader import FeatureStore
from data.features.target_pass import build_target_pass
from data.packing.documents import Packed
from models.console import CONSOLE
from models.drafts.base import Batch
from models.errors import UserError
from models.target.language_model import TargetOutput
from models.target.target import Target

log = logging.getLogger(__name__)

CACHED_FIELDS = ("hidden", "captured")  # of the TargetOutput that is kept in memory


class TargetFeatures:
    """The target's features of rows: read from a store, kept in memory, or computed in each step.

    In memory, every process keeps the features of all rows: each epoch deals the rows anew.
    """

    def __init__(
        self,
        target: Target,
        rows: Packed,
        layers: list[int],
        *,
        store: FeatureStore | None,
        in_memory: bool,
        batch_size: int,
        compiled: bool = False,
    ):
        self.target, self.rows, self.layers, self.store = target, rows, layers, store
        self._pass = build_target_pass(target, compiled=compiled)
        self.cached = self._compute_all(rows, batch_size) if in_memory else None

    def lookup(self, rows: list[int]) -> TargetOutput | None:
        """Return these rows' features, on the host, or None if the target must compute them."""
        if self.store is not None:
            return self.store.read_target_output(self.rows.pieces(rows), self.rows.length)
        if self.cached is None:
            return None
        return TargetOutput(hidden=self.cached.hidden[rows], captured=self.cached.captured[rows])

    @torch.no_grad()
    def see(self, batch: Batch) -> TargetOutput:
        return self._pass(self.target, self.layers, batch)

    def _compute_all(self, rows: Packed, batch_size: int) -> TargetOutput:
        """Compute the features of all rows.

        The groups do not depend on the step that a run continues from, so that sums round alike.
        """
        device = self.target.device.torch_device
        groups = torch.arange(len(rows)).split(batch_size)
        quiet = not CONSOLE.is_terminal
        features: TargetOutput | None = None
        compute = self.target.device.compile_if_lazy(self.see)
        for group in track(groups, "features", console=CONSOLE, disable=quiet):
            group_rows = (group[0] + torch.arange(batch_size)) % len(rows)  # one size, so one graph
            target_output = compute(rows.batch(group_rows.tolist()).to(device))
            if features is None:
                features = _allocate_features(target_output, len(rows))
            for name in CACHED_FIELDS:
                getattr(features, name)[group] = getattr(target_output, name).cpu()[: len(group)]
        assert features is not None
        return features


def _allocate_features(example: TargetOutput, num_rows: int) -> TargetOutput:
    """Allocate tensors for all rows; raise UserError where the machine lacks the memory."""
    tensors = [getattr(example, name) for name in CACHED_FIELDS]
    needed = sum(num_rows * tensor[0].nbytes for tensor in tensors)
    free = psutil.virtual_memory().available
    if needed > free // 2:
        raise UserError(
            f"data.keep_features: must fit in half of the free memory, got {needed / 1e9:.1f} GB "
            f"of features and {free / 1e9:.1f} GB free; set data.keep_features=false"
        )
    log.info("features: %.2f GB of the target's features are kept for all epochs", needed / 1e9)
    hidden, captured = (
        torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in tensors
    )
    return TargetOutput(hidden=hidden, captured=captured)
