"""The best case of a step's time in a layout."""

from collections import Counter

from models.device.config import MachineConf
from models.device.machine_specs import core_flops
from models.device.memory_trace import TracedPhase
from train.planning.fake_process import GATHERED, OPTIMIZER, SPLIT_HEADS, TRAINED
from train.planning.layout import ProcessLayout
from train.planning.trace import DRAFT_PASS, TARGET_PASS

WEIGHT_PASSES = 3  # a step reads weight and gradient and writes the weight
MOMENT_PASSES = 2  # and reads and writes each moment


def estimate_step_time(
    traced: dict[str, TracedPhase],
    layout: ProcessLayout,
    machine: MachineConf,
    *,
    held: Counter[str],
    target_bytes: int,
    row_bytes: int,
) -> dict[str, float]:
    """Estimate a step's seconds by each limit at best: only products count, the rest is fused, no core waits.

    `held` are the bytes of a core in every step, by part; `target_bytes` those of the target's weights before groups
    share them; `row_bytes` those of the hidden state of a row.
    """
    # With a feature store there is no target pass.
    passes = {name: layout.micros for name in (TARGET_PASS, DRAFT_PASS) if name in traced}
    if TARGET_PASS in passes:
        passes[TARGET_PASS] *= layout.deal.parts
    arithmetic = sum(
        count * flops / core_flops(machine, dtype)
        for name, count in passes.items()
        for dtype, flops in traced[name].flops_by_dtype.items()
    )
    moved = sum(count * traced[name].bytes_moved for name, count in passes.items())
    stepped = WEIGHT_PASSES * (held[TRAINED] + held[SPLIT_HEADS]) + MOMENT_PASSES * held[OPTIMIZER]
    # A ring passes all of a sum but this core's own part, and each layer has two sums.
    summed = 2 * layout.blocks * layout.rows * row_bytes * (layout.tensor - 1) // layout.tensor
    received = passes.get(TARGET_PASS, 0) * (2 * summed + target_bytes * layout.shards_target)
    received += _count_draft_bytes(held, layout) + layout.micros * traced[DRAFT_PASS].bytes_exchanged
    return {
        "arithmetic": arithmetic,
        "bandwidth": (moved + stepped) / machine.core_bandwidth,
        "links": received / machine.core_link_bandwidth,
    }


def _count_draft_bytes(held: Counter[str], layout: ProcessLayout) -> int:
    """Return the bytes of weights and gradients that a core receives in a step; an all-reduce gathers and reduces."""
    if layout.gathers_draft:  # gathered and reduced once per micro-batch
        return layout.micros * (held[GATHERED] + held[TRAINED] * layout.processes)
    return 2 * held[TRAINED] if layout.processes > 1 else 0
