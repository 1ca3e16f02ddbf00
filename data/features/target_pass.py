"""The target's pass over packed rows: one graph, the same for training, for keeping and on disk."""

from collections.abc import Callable

from models.drafts.base import Batch
from models.target.language_model import Seen
from models.target.target import Target

SETTLED = ("target.decoder.",)  # weights of the frozen target: see Device.compile

Pass = Callable[[Target, list[int], Batch], Seen]


def features(target: Target, layers: list[int], batch: Batch) -> Seen:
    """What the target computes on a batch of packed rows."""
    return target.see(batch.ids, positions=batch.positions, mask=batch.attends(), layers=layers)


def target_pass(target: Target, *, compiled: bool) -> Pass:
    """`features` as one graph, where that is wanted and can be had."""
    return target.device.compile(features, settled=SETTLED) if compiled else features
