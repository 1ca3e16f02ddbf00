"""What the target computes on the training rows: as they come, or once for all epochs and runs."""

import logging

import psutil
import torch
from rich.progress import track

from data.features.reader import Store
from data.features.target_pass import target_pass
from data.packing.documents import Packed
from models.console import CONSOLE
from models.drafts.base import Batch
from models.errors import UserError
from models.target.language_model import Seen
from models.target.target import Target

log = logging.getLogger(__name__)

PARTS = ("hidden", "captured")  # of what is kept


class Features:
    """The target's view of rows: read from a store, kept in memory, or seen as they come.

    In memory every process keeps all rows: each epoch deals them anew.
    """

    def __init__(
        self, target: Target, rows: Packed, layers: list[int], *, store: Store | None, keep: bool,
        batch_size: int, compiled: bool = False,
    ):  # fmt: skip
        self.target, self.rows, self.layers, self.store = target, rows, layers, store
        self._pass = target_pass(target, compiled=compiled)
        self.kept = self._keep(rows, batch_size) if keep else None

    def of(self, rows: list[int]) -> Seen | None:
        """What is known of these rows, on the host; None: the target is to look at them."""
        if self.store is not None:
            return self.store.seen(self.rows.pieces(rows), self.rows.length)
        if self.kept is None:
            return None
        return Seen(hidden=self.kept.hidden[rows], captured=self.kept.captured[rows])

    @torch.no_grad()
    def see(self, batch: Batch) -> Seen:
        return self._pass(self.target, self.layers, batch)

    def _keep(self, rows: Packed, batch_size: int) -> Seen:
        """All rows, in groups that do not depend on where a run goes on: the sums round alike."""
        device = self.target.device.torch_device
        groups = torch.arange(len(rows)).split(batch_size)
        quiet = not CONSOLE.is_terminal
        kept: Seen | None = None
        see = self.target.device.glue(self.see)
        for group in track(groups, "features", console=CONSOLE, disable=quiet):
            full = (group[0] + torch.arange(batch_size)) % len(rows)  # all groups share a graph
            seen = see(rows.batch(full.tolist()).to(device))
            if kept is None:
                kept = _room(seen, len(rows))
            for name in PARTS:
                getattr(kept, name)[group] = getattr(seen, name).cpu()[: len(group)]
        assert kept is not None
        return kept


def _room(first: Seen, rows: int) -> Seen:
    """Empty tensors for all rows. Raises UserError where the machine has not the memory."""
    views = [getattr(first, name) for name in PARTS]
    needed = sum(rows * view[0].nbytes for view in views)
    free = psutil.virtual_memory().available
    if needed > free // 2:
        raise UserError(
            f"data.keep_features: must fit in half of the free memory, got {needed / 1e9:.1f} GB "
            f"of features and {free / 1e9:.1f} GB free; set data.keep_features=false"
        )
    log.info("features: %.2f GB of the target's features are kept for all epochs", needed / 1e9)
    hidden, captured = (torch.empty((rows, *v.shape[1:]), dtype=v.dtype) for v in views)
    return Seen(hidden=hidden, captured=captured)
