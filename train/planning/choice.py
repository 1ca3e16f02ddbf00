"""Plan a run, and choose its layout where `parallel=auto` leaves that to the plan."""

from dataclasses import replace

import torch

from models.device.config import MachineConf
from models.device.machine_specs import check_dtype
from models.targets.precision import resolve_machine
from train.config.run import ParallelConf, TrainPlanConf, Weights
from train.distributed.build import check_layout
from train.planning.layout import list_layouts
from train.planning.run_plan import MachinePlan, build_models, plan_layouts, read_store


def plan_run(conf: TrainPlanConf) -> MachinePlan:
    """Return a plan with all layouts of a run; raise UserError for what no layout can do."""
    check_layout(conf)
    machine, dtype = resolve_machine(conf.machine, conf.device, conf.target)
    check_dtype(machine, dtype)
    conf.data.check_row_length(machine.length_multiple, on=machine.name)
    if conf.parallel.auto:
        conf = choose_layout(conf, machine, dtype, most_sharing=machine.total_cores)
    target, draft = build_models(conf, dtype)
    store = read_store(conf, target, draft)
    if store is not None and conf.tokens is None:
        conf = replace(conf, tokens=float(store.spec.tokens))
    return plan_layouts(conf, machine, dtype, list_layouts(conf, machine, target))


def choose_layout(conf: TrainPlanConf, machine: MachineConf, dtype: torch.dtype, *, most_sharing: int) -> TrainPlanConf:
    """Return the run in the first layout that fits; if none does, in that of `parallel=replicated`.

    Layouts use all cores, and come in the order of what they cost: first whole drafts, then gathered ones, each with
    few cores that share the target before many, at most `most_sharing`; last those whose layers run again in the
    backward pass.
    """
    whole = replace(conf, parallel=ParallelConf())
    target, _ = build_models(whole, dtype)
    layouts = [
        layout
        for layout in list_layouts(whole, machine, target)
        if layout.processes == machine.total_cores and layout.tensor <= most_sharing
    ]
    drafts = [Weights.replicated] if conf.draft.trains_target or machine.total_cores == 1 else list(Weights)
    can_recompute = conf.draft.has_layers and not conf.optim.recompute
    for recompute in [conf.optim.recompute, *([True] * can_recompute)]:
        for draft in drafts:
            for layout in layouts:
                parallel = ParallelConf(tensor=layout.tensor, draft=draft)
                candidate = replace(whole, parallel=parallel, optim=replace(conf.optim, recompute=recompute))
                plan = plan_layouts(candidate, machine, dtype, [replace(layout, draft=draft)])
                if plan.fits(plan.best):
                    return candidate
    return whole
