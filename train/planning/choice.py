"""Plan a run, and choose what its `parallel` leaves to the plan."""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from operator import attrgetter

import torch

from models.device.config import MachineConf
from models.device.machine_specs import check_dtype
from models.targets.precision import resolve_machine
from train.config.optim import AUTO
from train.config.run import TrainConf, TrainPlanConf, Weights
from train.distributed.build import check_layout
from train.planning.layout import ProcessLayout, list_layouts
from train.planning.remedies import apply_overrides, can_train, find_overrides
from train.planning.run_plan import MachinePlan, build_models, plan_layouts, read_store

# What the plan of a run may choose beside parallel.tensor: it changes how the run computes, not what it learns.
CHOSEN_KEYS = (
    *("parallel.target", "parallel.draft", "parallel.split_heads"),
    *("optim.recompute", "loss.logits_chunk", "held_out.batch"),
)


def plan_run(conf: TrainPlanConf) -> MachinePlan:
    """Return the plan of a run; raise UserError for what no layout can do."""
    check_layout(conf)
    machine, dtype = resolve_machine(conf.machine, conf.device, conf.target)
    check_dtype(machine, dtype)
    conf.data.check_row_length(machine.length_multiple, on=machine.name)
    target, draft = build_models(conf, dtype)
    store = read_store(conf, target, draft)
    if store is not None and conf.tokens is None:
        conf = replace(conf, tokens=float(store.spec.tokens))
    if conf.parallel.is_open and machine.total_cores > 1:
        plan = choose_layout(conf, machine, dtype, most_sharing=machine.total_cores)
        return record_choice(plan, conf) if plan.fits(plan.best) else plan
    return plan_layouts(conf, machine, dtype, list_layouts(conf, machine, target))


def choose_layout(conf: TrainPlanConf, machine: MachineConf, dtype: torch.dtype, *, most_sharing: int) -> MachinePlan:
    """Return the plan of the first layout that fits; if none does, that of the run as it is.

    Layouts use all cores, and come in the order of what they cost: first whole drafts, then gathered ones, each with
    few cores that share the target before many, at most `most_sharing`; then those whose layers run again in the
    backward pass, those with split heads, and a sharded target, which no graph holds. Last, less is computed at once.
    """
    target, _ = build_models(conf, dtype)

    def list_candidate_layouts(candidate: TrainPlanConf) -> list[ProcessLayout]:
        return [
            layout
            for layout in list_layouts(candidate, machine, target)
            if layout.processes == machine.total_cores
            and layout.tensor <= most_sharing
            and can_train(candidate, layout)
        ]

    for candidate in _list_candidates(conf):
        if layouts := list_candidate_layouts(candidate):
            plan = plan_layouts(candidate, machine, dtype, layouts)
            if plan.fits(plan.best):
                return plan
    plan = plan_layouts(conf, machine, dtype, list_candidate_layouts(conf) or list_layouts(conf, machine, target))
    if plan.fits(plan.best):  # with fewer cores than there are
        return plan
    change = find_overrides(plan)
    is_open = {"parallel.tensor": conf.parallel.tensor == AUTO, "parallel.draft": conf.parallel.draft is Weights.auto}
    if change and all(is_open.get(key, key in CHOSEN_KEYS) for key in change):
        candidate = apply_overrides(conf, change)
        if layouts := list_candidate_layouts(candidate):
            return plan_layouts(candidate, machine, dtype, layouts)
    return plan


def _list_candidates(conf: TrainPlanConf) -> Iterator[TrainPlanConf]:
    """Yield the run with each placement of weights that it leaves open, the cheapest first."""
    whole, can_shard = conf.parallel.settle(), not conf.draft.trains_target
    placements = [replace(whole, tensor=conf.parallel.tensor)]
    if conf.parallel.draft is Weights.auto and can_shard:
        placements.append(replace(placements[0], draft=Weights.sharded))
    recomputes = sorted({conf.optim.recompute, conf.draft.has_layers and conf.device.is_native})
    ways = [(placement, recompute) for recompute in recomputes for placement in placements]
    if placements[-1].draft is Weights.sharded and conf.draft.trains_heads and not whole.split_heads:
        ways += [(replace(placements[-1], split_heads=True), recompute) for recompute in recomputes]
    if conf.parallel.target is Weights.auto and whole.tensor == 1 and can_shard and conf.measure:
        sharded = replace(placements[-1], tensor=1, target=Weights.sharded)
        ways += [(sharded, recompute) for recompute in recomputes]
    for placement, recompute in ways:
        yield replace(conf, parallel=placement, optim=replace(conf.optim, recompute=recompute))


def record_choice(plan: MachinePlan, asked: TrainConf) -> MachinePlan:
    """Return a plan that fits with its layout in the run, and as overrides what differs from the run as `asked`."""
    chosen = replace(plan.conf, parallel=replace(plan.conf.parallel.settle(), tensor=plan.best.layout.tensor))
    asked = replace(asked, parallel=asked.parallel.settle())
    values = {key: attrgetter(key)(chosen) for key in CHOSEN_KEYS}
    texts = {key: value.name if isinstance(value, Enum) else str(value).lower() for key, value in values.items()}
    choices = [f"{key}={text}" for key, text in texts.items() if values[key] != attrgetter(key)(asked)]
    return replace(plan, conf=chosen, choices=choices)
