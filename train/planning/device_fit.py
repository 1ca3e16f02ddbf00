"""Ask the plan whether a run fits the device at hand, and choose `optim.micro_batch_size=auto`; load no model."""

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path

from infer.inputs.memory_check import find_core_bytes
from models.checkpoints.saved_states import find_newest_state, read_progress_file
from models.device.config import LOCAL_MACHINE, MachineConf
from models.io.errors import UserError, require
from models.meta_model import build_meta_target
from models.parallel import torchrun
from train.config.optim import AUTO
from train.config.run import TrainConf, TrainPlanConf
from train.distributed.build import check_parallel
from train.distributed.parallel import Parallel
from train.planning.choice import choose_layout
from train.planning.layout import build_layout
from train.planning.remedies import suggest_overrides
from train.planning.run_plan import MachinePlan, plan_layouts

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

    A continued run keeps its micro-batch size where it fits. Raise UserError, with overrides that fit, if nothing fits.
    """
    saved_rows = read_saved_rows(conf)
    is_auto = conf.optim.micro_batch_size == AUTO
    core_bytes = find_core_bytes(conf.device.memory_gib, parallel.device)
    if core_bytes is None:
        log.info(
            "memory: %s does not tell its memory, so whether the run fits is not checked; device.memory_gib=N sets it",
            parallel.device.name,
        )
        return FittedRun(
            conf=set_micro_batch_size(conf, saved_rows or 1) if is_auto else conf, parallel=parallel, planned_bytes=None
        )
    core_bytes = min(parallel.gather(core_bytes))  # so that all choose alike
    wanted = conf
    if is_auto and saved_rows is not None:
        conf = set_micro_batch_size(conf, saved_rows)
    plan = plan_on_device(conf, parallel, core_bytes)
    if conf is not wanted and not plan.fits(plan.best):
        conf = wanted
        plan = plan_on_device(conf, parallel, core_bytes)
    if conf.parallel.is_open and conf.device.is_native and not parallel.is_single_process:
        if not (plan.fits(plan.best) and plan.best.layout.processes == plan.machine.total_cores):
            plan = choose_layout(
                as_plan_conf(wanted, plan.machine),
                plan.machine,
                plan.dtype,
                most_sharing=torchrun.get_local_world_size(),
            )
        if plan.fits(plan.best):
            conf, parallel = take_layout(conf, parallel, plan)
    if not plan.fits(plan.best):
        raise UserError(describe_misfit(plan))
    rows = plan.best.layout.rows
    require(
        len(set(parallel.gather(rows))) == 1,
        f"optim.micro_batch_size: must be the same on all processes, got {rows} here for auto; give a number",
    )
    if conf.optim.micro_batch_size == AUTO:
        log.info("optim.micro_batch_size: auto takes %d, the most rows of a pass that fit", rows)
        conf = set_micro_batch_size(conf, rows)
    return FittedRun(conf=conf, parallel=parallel, planned_bytes=plan.best.peak_bytes)


def take_layout(conf: TrainConf, parallel: Parallel, plan: MachinePlan) -> tuple[TrainConf, Parallel]:
    """Return the run, and its processes, in the layout of a plan that fits; raise UserError if they cannot train."""
    chosen = plan.conf
    placement = chosen.parallel.settle()
    conf = replace(conf, parallel=placement, optim=chosen.optim, loss=chosen.loss, held_out=chosen.held_out)
    check_parallel(conf)
    keys = " ".join([f"parallel.tensor={placement.tensor}", *plan.choices])
    log.info("parallel: auto takes %s, the first layout that fits %d processes", keys, plan.machine.total_cores)
    return conf, replace(parallel, conf=placement)


def read_saved_rows(conf: TrainConf) -> int | None:
    """Return the rows per pass of the run that this one continues, or None if it continues none."""
    if not conf.resume:
        return None
    newest = find_newest_state(Path(conf.output_dir) / conf.run_name)
    return read_progress_file(newest)["config"]["optim.micro_batch_size"] if newest else None


def plan_on_device(conf: TrainConf, parallel: Parallel, core_bytes: float) -> MachinePlan:
    """Return the plan of the run's own layout; only its memory is of use, its times are not."""
    device, machine = parallel.device, describe_machine(parallel, core_bytes)
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


def set_micro_batch_size(conf: TrainConf, rows: int) -> TrainConf:
    return replace(conf, optim=replace(conf.optim, micro_batch_size=rows))
