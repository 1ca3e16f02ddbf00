"""The target's pass over packed rows, of training and of a capture alike, so that both use one graph."""

from collections.abc import Callable

from models.batch import Batch
from models.targets.language_model import TargetOutput
from models.targets.target import WEIGHT_NAMES, Target

TargetPass = Callable[[Target, list[int], Batch], TargetOutput]


def run_target(target: Target, layers: list[int], batch: Batch) -> TargetOutput:
    """Return the target's captured layers and final hidden states on a batch of packed rows."""
    return target.forward_hidden(batch.input_ids, positions=batch.positions, mask=batch.attention_mask(), layers=layers)


def build_target_pass(target: Target, *, compiled: bool) -> TargetPass:
    """Return `run_target`, as one compiled graph if `compiled`."""
    return target.device.compile_part(run_target, frozen_names=WEIGHT_NAMES) if compiled else run_target
