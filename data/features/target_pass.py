"""The target's pass over packed rows, shared by training and capture so that both use one graph."""

from collections.abc import Callable

from models.drafts.base import Batch
from models.target.language_model import TargetOutput
from models.target.target import Target

FROZEN_PREFIXES = ("target.decoder.",)  # weights of the frozen target: see Device.compile

TargetPass = Callable[[Target, list[int], Batch], TargetOutput]


def features(target: Target, layers: list[int], batch: Batch) -> TargetOutput:
    """Return the target's captured layers and final hidden states on a batch of packed rows."""
    return target.forward_hidden(
        batch.input_ids, positions=batch.positions, mask=batch.attention_mask(), layers=layers
    )


def build_target_pass(target: Target, *, compiled: bool) -> TargetPass:
    """Return `features`, as one compiled graph if `compiled`."""
    if not compiled:
        return features
    return target.device.compile_part(features, frozen_names=FROZEN_PREFIXES)
