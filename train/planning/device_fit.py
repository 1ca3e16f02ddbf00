"""Ask the plan whether a run fits the device at hand, and choose `optim.micro_batch_size=auto`; load no model."""

import logging
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from infer.inputs.memory_check import QUANTIZED_LINE, find_core_bytes
from models.checkpoints.saved_states import find_newest_state, read_progress_file
from models.device.config import LOCAL_MACHINE, MachineConf
from models.device.device import Device
from models.io.errors import UserError
from models.meta_model import build_meta_target
from models.parallel import torchrun
from models.parallel.tensor_parallel import check_torch
from models.targets.pretrained import read_planning_config
from models.targets.stored_weights import stays_quantized
from train.config.optim import AUTO
from train.config.run import TrainConf, TrainPlanConf, Weights
from train.distributed.build import check_parallel
from train.distributed.parallel import Parallel
from train.planning.choice import choose_layout, record_choice
from train.planning.layout import build_layout
from train.planning.remedies import apply_overrides, suggest_overrides
from train.planning.run_plan import MachinePlan, plan_layouts
from train.run.state import STATE_VERSION, read_saved_config

GIB = 2**30
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """A configuration that fits its processes, and the bytes that the plan gives each of them."""

    conf: TrainConf
    parallel: Parallel
    planned_bytes: int | None  # None: the device does not tell its memory


def fit_run(conf: TrainConf, parallel: Parallel) -> FittedRun:
    """Return the run with what it leaves to its plan, and its planned memory.

    A continued run keeps what was chosen before where it fits. Raise UserError, with overrides that fit, if nothing
    fits.
    """
    saved = read_saved_settings(conf)
    may_choose = conf.parallel.is_open and not parallel.is_single_process and not parallel.device.lazy
    core_bytes = find_core_bytes(conf.device.memory_gib, parallel.device)
    is_quantized = stays_quantized(read_planning_config(conf.target))
    if core_bytes is None or is_quantized:
        unknown = (
            f"memory: {parallel.device.name} does not tell its memory, so whether the run fits is not checked; "
            "device.memory_gib=N sets it"
        )
        log.info(QUANTIZED_LINE if is_quantized else unknown)
        check_parallel(replace(conf, parallel=conf.parallel.settle()))
        if conf.optim.micro_batch_size == AUTO:
            conf = apply_overrides(conf, {"optim.micro_batch_size": saved.get("optim.micro_batch_size", 1)})
        return FittedRun(conf=conf, parallel=parallel, planned_bytes=None)
    core_bytes = min(parallel.gather(core_bytes))  # so that all choose alike
    per_node = min(parallel.gather(torchrun.get_local_world_size()))
    machine = describe_machine(parallel, core_bytes)
    continued, plan = parallel.run_on_main(
        lambda: plan_continued(conf, saved, machine, parallel.device, per_node=int(per_node), may_choose=may_choose)
    )
    if not parallel.is_single_process:
        continued, parallel = take_layout(continued, parallel, record_choice(plan, conf), is_chosen=may_choose)
    rows = plan.best.layout.rows
    if continued.optim.micro_batch_size == AUTO:
        log.info("optim.micro_batch_size: auto takes %d, the most rows of a pass that fit", rows)
        continued = apply_overrides(continued, {"optim.micro_batch_size": rows})
    return FittedRun(conf=continued, parallel=parallel, planned_bytes=plan.best.peak_bytes)


def plan_continued(
    conf: TrainConf, saved: dict[str, Any], machine: MachineConf, device: Device, *, per_node: int, may_choose: bool
) -> tuple[TrainConf, MachinePlan]:
    """Return the run with what it keeps of its saved settings, and its plan, in a layout chosen if none is usable.

    At most `per_node` processes, those of a node, share the target. Raise UserError if nothing fits.
    """
    saved_tensor = saved.get("parallel.tensor", AUTO)
    can_keep = saved_tensor == AUTO or machine.total_cores % saved_tensor == 0
    continued = keep_choices(conf, saved, with_layout=may_choose and can_keep)
    plan = plan_as_it_is(continued, machine, device)
    if continued != conf and not is_usable(plan):
        continued, plan = conf, plan_as_it_is(conf, machine, device)
    if may_choose and not is_usable(plan):
        continued, plan = conf, choose_on_devices(conf, plan, per_node)
    if not plan.fits(plan.best):
        raise UserError(describe_misfit(plan))
    return continued, plan


def is_usable(plan: MachinePlan) -> bool:
    """Return whether a run fits and gives every process rows."""
    return plan.fits(plan.best) and plan.best.layout.processes == plan.machine.total_cores


def read_saved_settings(conf: TrainConf) -> dict[str, Any]:
    """Return the settings by key of the run that this one continues, {} if it continues none.

    A state of another version is refused later, by its number.
    """
    newest = find_newest_state(Path(conf.output_dir) / conf.run_name) if conf.resume else None
    return read_saved_config(newest) if newest and read_progress_file(newest)["version"] == STATE_VERSION else {}


def keep_choices(conf: TrainConf, saved: dict[str, Any], *, with_layout: bool) -> TrainConf:
    """Return the run with what the run before it had chosen: rows of a pass, and `with_layout` all of its layout."""
    if not saved:
        return conf
    placement = ("parallel.tensor", "parallel.target", "parallel.draft") if with_layout else ()
    left_open = [key for key in ("optim.micro_batch_size", *placement) if attrgetter(key)(conf) in (AUTO, Weights.auto)]
    kept = {key: saved[key] for key in left_open}
    if with_layout:
        switches = ["optim.recompute", *(["parallel.split_heads"] if "parallel.draft" in kept else [])]
        kept |= {key: attrgetter(key)(conf) or saved[key] for key in switches}
        kept |= {key: min(attrgetter(key)(conf), saved[key]) for key in ("loss.logits_chunk", "held_out.batch")}
    return apply_overrides(conf, kept)


def choose_on_devices(conf: TrainConf, plan: MachinePlan, per_node: int) -> MachinePlan:
    """Return the plan in the layout that it chooses for the devices at hand."""
    asked = as_plan_conf(conf, plan.machine)
    try:
        check_torch(splits_weights=True)
    except UserError:  # whole weights are left
        asked = replace(asked, parallel=conf.parallel.settle())
    most_sharing = per_node & -per_node  # the largest power of two whose groups lie within nodes
    return choose_layout(asked, plan.machine, plan.dtype, most_sharing=most_sharing)


def take_layout(
    conf: TrainConf, parallel: Parallel, plan: MachinePlan, *, is_chosen: bool
) -> tuple[TrainConf, Parallel]:
    """Return the run, and its processes, in the layout of a plan that fits; raise UserError if they cannot train."""
    chosen = plan.conf
    conf = replace(conf, parallel=chosen.parallel, optim=chosen.optim, loss=chosen.loss, held_out=chosen.held_out)
    check_parallel(conf)
    if is_chosen:
        keys = " ".join([f"parallel.tensor={chosen.parallel.tensor}", *plan.choices])
        log.info("parallel: %d processes train by %s", plan.machine.total_cores, keys)
    return conf, replace(parallel, conf=chosen.parallel)


def plan_as_it_is(conf: TrainConf, machine: MachineConf, device: Device) -> MachinePlan:
    """Return the plan of the run's own layout; only its memory is of use, its times are not."""
    plan_conf = as_plan_conf(conf, machine)
    target = build_meta_target(conf.target, device.dtype)
    layout = build_layout(plan_conf, machine, target.num_layers, conf.parallel.tensor_size)
    return plan_layouts(plan_conf, machine, device.dtype, [layout])


def as_plan_conf(conf: TrainConf, machine: MachineConf) -> TrainPlanConf:
    return TrainPlanConf(**{part.name: getattr(conf, part.name) for part in fields(TrainConf)}, machine=machine)


def describe_machine(parallel: Parallel, core_bytes: float) -> MachineConf:
    """Return the devices of the run's processes as a machine whose speeds are made up."""
    device = parallel.device
    return MachineConf(
        name=LOCAL_MACHINE,
        chips=parallel.accelerator.num_processes,
        memory_gib=core_bytes / GIB,
        bandwidth_gb_s=1.0,
        tflops={"float32": 1.0, "bfloat16": 1.0},
        length_multiple=device.length_multiple,
        is_accelerator=device.torch_device.type != "cpu",
        scores_in_memory=device.scores_in_memory,
    )


def describe_misfit(plan: MachinePlan) -> str:
    """Return what the run needs, what the device has, and overrides with which it fits."""
    needed, usable = plan.best.peak_bytes / GIB, plan.byte_limit / GIB
    changes = suggest_overrides(plan)
    remedy = f"with {' '.join(changes)} it fits" if changes else "take a larger device"
    bound = "" if plan.best.phases else "more than "  # only what every step holds was counted
    key = "device" if plan.conf.device.memory_gib is None else "device.memory_gib"
    return (
        f"{key}: must hold the run, which needs {bound}{needed:.2f} GiB per process by "
        f"its plan, got {usable:.2f} usable of {plan.machine.core_bytes / GIB:.2f}; {remedy}"
    )
