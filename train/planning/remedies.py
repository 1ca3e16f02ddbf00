"""Find overrides with which a run fits, by tracing it with each of them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from conf.typed_text import format_overrides
from data.config import DataSource, list_unread_defaults
from models.device.memory_trace import LOGITS
from models.io.errors import UserError
from train.config.run import ParallelConf, TrainConf, TrainPlanConf, Weights
from train.distributed.build import check_layout
from train.planning.fake_process import GATHERED, GRADIENTS, PERSISTENT_PARTS, SPLIT_HEADS, START, TRAINED
from train.planning.layout import ProcessLayout, build_layout
from train.planning.run_plan import LayoutOption, MachinePlan, build_option
from train.planning.trace import DRAFT_PASS, EVALUATION

MAX_TRIES = 6  # per layout; each changes one size in proportion, which may be too little
MAX_LOGIT_CHUNKS = 16  # most parts that a chunk of logits is split into, before rows shrink
MIN_ROW_LENGTH = 128  # tokens of a row
ROW_LENGTH = "data.row_length"
Conf = TypeVar("Conf", bound=TrainConf)
Candidate = tuple[TrainPlanConf, LayoutOption, dict[str, Any]]  # and the overrides that lead to it


def suggest_overrides(plan: MachinePlan) -> list[str]:
    """Return the overrides with which a run fits, as typed."""
    return [format_overrides({key: value}) for key, value in find_overrides(plan).items()]


def find_overrides(plan: MachinePlan) -> dict[str, Any]:
    """Return the overrides of the first layout that fits with full rows, else of that with the longest, else {}."""
    if plan.remedy is None:
        plan.remedy = _find_change(plan, _list_candidates(plan))
        if not plan.remedy or ROW_LENGTH in plan.remedy:  # shorter rows change what is learned, a store does not
            stored = _find_change(plan, _list_stored(plan))
            plan.remedy = stored if ROW_LENGTH not in stored and stored else plan.remedy or stored
    return plan.remedy


def _find_change(plan: MachinePlan, candidates: Iterable[Candidate]) -> dict[str, Any]:
    longest: dict[str, Any] = {}
    for conf, option, layout_overrides in candidates:
        if not can_train(conf, option.layout):
            continue
        overrides = _fit_layout(plan, conf, option, longer_than=longest.get(ROW_LENGTH, 0))
        if overrides is not None:
            longest = layout_overrides | overrides
            if ROW_LENGTH not in overrides:
                break
    return longest


def can_train(conf: TrainPlanConf, layout: ProcessLayout) -> bool:
    """Return whether the draft and the device's route can train in a layout of these settings."""
    try:
        check_layout(replace(conf, parallel=replace(conf.parallel, tensor=layout.tensor)))
        conf.check_measure()
    except UserError:
        return False
    return True


def _list_candidates(plan: MachinePlan) -> Iterator[Candidate]:
    """Yield configurations, layouts and the overrides to them: the plan's, sharded drafts, draft and target sharded."""
    conf, smallest = plan.conf, plan.options[0]
    for option in plan.options:
        is_changed = option.layout.tensor != conf.parallel.tensor_size
        yield conf, option, {"parallel.tensor": option.layout.tensor} if is_changed else {}
    if conf.draft.trains_target or plan.machine.total_cores == 1:
        return
    parallel = replace(conf.parallel, draft=Weights.sharded)
    for candidate in [parallel, replace(parallel, split_heads=True)][: 1 + conf.draft.trains_heads]:
        for option in plan.options if candidate != conf.parallel else []:
            change = {"parallel.tensor": option.layout.tensor, "parallel.draft": "sharded"}
            change |= {"parallel.split_heads": True} if candidate.split_heads else {}
            sharded = replace(option.layout, draft=Weights.sharded, split_heads=candidate.split_heads)
            yield replace(conf, parallel=candidate), build_option(conf, plan.dtype, sharded), change
    if conf.parallel.tensor_size > 1 or Weights.sharded in (conf.parallel.target, conf.parallel.draft):
        return
    rows = max(conf.optim.rows_per_step, plan.machine.total_cores)
    change = {"parallel": "sharded", "optim.micro_batch_size": 1}
    if rows > conf.optim.rows_per_step:
        change["optim.rows_per_step"] = rows
    conf = apply_overrides(conf, {key: value for key, value in change.items() if "." in key})
    conf = replace(conf, parallel=replace(parallel, target=Weights.sharded))
    layout = build_layout(conf, plan.machine, smallest.layout.blocks, 1)
    yield conf, build_option(conf, plan.dtype, layout), change


def _list_stored(plan: MachinePlan) -> Iterator[Candidate]:
    """Yield layouts of the run from a feature store without the target's layers, for which another machine captures."""
    conf = plan.conf
    if not conf.measure or conf.data.on_policy.share:
        return
    change: dict[str, Any] = {"data": "captured", "measure": False}
    if conf.data.keep_features:
        change["data.keep_features"] = False
    if conf.parallel.tensor_size > 1:
        change["parallel.tensor"] = 1
    if conf.parallel.target is Weights.sharded:
        change["parallel.target"] = "replicated"
    unread = list_unread_defaults(DataSource.captured) | ({"split": "train"} if "[" in conf.data.split else {})
    change |= {f"data.{name}": value for name, value in unread.items() if getattr(conf.data, name) != value}
    data = replace(conf.data, source=DataSource.captured, path=None, keep_features=False, **unread)
    layouts = [(ParallelConf(draft=Weights.replicated), change)]
    if plan.machine.total_cores > 1:  # first, because it leaves more rows to a pass
        sharded, words = ParallelConf(draft=Weights.sharded), change | {"parallel.draft": "sharded"}
        layouts.insert(0, (sharded, words))
        if conf.draft.trains_heads and conf.device.is_native:
            layouts.append((replace(sharded, split_heads=True), words | {"parallel.split_heads": True}))
    for parallel, overrides in layouts:
        stored = replace(conf, data=data, measure=False, parallel=parallel)
        layout = build_layout(stored, plan.machine, plan.options[0].layout.blocks, 1)
        yield stored, build_option(stored, plan.dtype, layout), overrides


def _fit_layout(
    plan: MachinePlan, conf: TrainPlanConf, option: LayoutOption, *, longer_than: int
) -> dict[str, int] | None:
    """Return the overrides that make this layout fit, or None if none do.

    Rows are not cut to `longer_than` tokens or fewer: another layout fits with these.
    """
    if not option.phases:
        if option.peak_bytes > plan.byte_limit:
            return None
        option = plan.trace_layout(option, conf)
    overrides: dict[str, int] = {}
    for _ in range(MAX_TRIES):
        if plan.fits(option):
            return overrides
        change = _shrink_tightest_phase(conf, option, plan)
        if not change or change.get(ROW_LENGTH, conf.data.row_length) <= longer_than:
            return None
        overrides |= change
        conf = apply_overrides(conf, change)
        smaller = build_layout(conf, plan.machine, option.layout.blocks, option.layout.tensor)
        option = plan.trace_layout(replace(option, layout=smaller), conf)
    return overrides if plan.fits(option) else None


def _shrink_tightest_phase(conf: TrainPlanConf, option: LayoutOption, plan: MachinePlan) -> dict[str, int]:
    """Return an override that shrinks the tightest phase in proportion, or {} if none can."""
    limit, phases = plan.byte_limit, option.memory_by_phase
    sizes = {name: _split_bytes(name, parts) for name, parts in phases.items()}
    if any(fixed > limit for fixed, _ in sizes.values()):
        return {}
    shares = {name: (limit - fixed) / growing for name, (fixed, growing) in sizes.items() if growing}
    tightest = min(shares, key=lambda name: shares[name])
    share, (fixed, growing) = shares[tightest], sizes[tightest]
    if share >= 1:
        return {}
    logits = phases[tightest][LOGITS]
    spare = limit - fixed - (growing - logits)
    if spare >= logits / MAX_LOGIT_CHUNKS:
        steps = getattr(conf.draft, "ttt_steps", getattr(conf.draft, "heads", 1))
        chunk = min(conf.loss.logits_chunk, option.layout.rows * conf.data.row_length * steps)  # a pass has no more
        return {"loss.logits_chunk": max(1, int(chunk * spare / logits))}
    if tightest == EVALUATION:
        batch = int(conf.held_out.largest_batch * share)
        return {"held_out.batch": batch} if batch >= 1 else {}
    fitting_rows = option.layout.rows * share
    if option.layout.rows > 1:
        return {"optim.micro_batch_size": option.layout.count_fitting_rows(fitting_rows)}
    can_recompute = conf.draft.has_layers and conf.device.is_native
    if tightest == DRAFT_PASS and can_recompute and not conf.optim.recompute:
        return {"optim.recompute": True}
    multiple = max(MIN_ROW_LENGTH, plan.machine.length_multiple)
    length = int(conf.data.row_length * fitting_rows) // multiple * multiple
    shortest = max(MIN_ROW_LENGTH, 2 * (conf.data.overlap or 0))  # what data.overlap takes
    return {ROW_LENGTH: length} if length >= shortest else {}


def _split_bytes(phase: str, parts: Counter[str]) -> tuple[int, int]:
    """Return the bytes of a phase as (fixed, growing with its sizes)."""
    held = sum(parts[part] for part in (*PERSISTENT_PARTS, GATHERED, GRADIENTS))
    # At the end of a training step, every trained weight has a gradient.
    learned = max(parts[TRAINED], parts[GATHERED]) + parts[SPLIT_HEADS]
    missing = 0 if phase in (START, EVALUATION) else max(0, learned - parts[GRADIENTS])
    return held + missing, parts.total() - held


def apply_overrides(conf: Conf, change: dict[str, Any]) -> Conf:
    for key, value in change.items():
        group, _, name = key.rpartition(".")
        if key in ("parallel.target", "parallel.draft"):
            value = Weights[value]
        section = replace(getattr(conf, group), **{name: value}) if group else value
        conf = replace(conf, **{group or name: section})
    return conf
