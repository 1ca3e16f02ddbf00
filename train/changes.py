"""What to change where a run does not fit: overrides that were tried, and with which it does."""

from collections import Counter
from dataclasses import replace

from train.layout import BUCKETS, held, layout
from train.options import Option, Options, Plan, follow
from train.parallel import Weights
from train.trace import EVALUATES, GRADIENTS, STAYS, TRAINED

TRIES = 3  # of a layout: what is estimated in proportion may be a little too much
SHORTEST = 128  # tokens of a row
SHARDED = {"parallel.draft": "sharded"}


def changes(plan: Plan) -> list[str]:
    """Overrides of the first layout that can be made to fit, by itself or with a sharded draft."""
    tries = [(plan.conf, option, {}) for option in plan.options]
    if plan.conf.parallel.draft is Weights.replicated and not plan.conf.draft.adapts:
        tries += [(*_sharded(plan.conf, option), SHARDED) for option in plan.options]
    for conf, option, before in tries:
        if option.trace is not None and (found := _changes(plan, conf, option)):
            made = {"parallel.tensor": option.layout.tensor} | before | found
            return [f"{key}={value}" for key, value in made.items()]
    return []


def _sharded(conf: Options, option: Option) -> tuple[Options, Option]:
    """The same with a draft of which each process holds a part."""
    layout = replace(option.layout, draft=Weights.sharded)
    parallel = replace(conf.parallel, draft=Weights.sharded)
    return replace(conf, parallel=parallel), replace(option, layout=layout)


def _changes(plan: Plan, conf: Options, option: Option) -> dict[str, int]:
    """Of one layout, tried; nothing where it cannot be made to fit."""
    made: dict[str, int] = {}
    for _ in range(TRIES):
        change = _change(conf, option, plan)
        if not change:
            return {}
        made |= change
        conf = changed(conf, change)
        option = Option(
            layout=layout(conf, plan.machine, option.layout.blocks, option.layout.tensor),
            weights=option.weights,
        )
        follow(option, conf, plan.machine, plan.dtype)
        if plan.fits(option):
            return made
    return {}


def _change(conf: Options, option: Option, plan: Plan) -> dict[str, int]:
    """In proportion to what is too much; nothing where no row is short enough."""
    assert option.trace is not None
    change: dict[str, int] = {}
    phases = {name: held(phase, option.layout) for name, phase in option.trace.phases.items()}
    room = {name: _room(parts, plan.limit) for name, parts in phases.items()}
    rows, length = option.layout.rows, conf.data.length
    share = min(value for name, value in room.items() if name != EVALUATES)
    if share < 1:
        wanted = rows * share
        if rows > 1:
            whole = conf.optim.batch_size * conf.optim.accumulation
            fewer = max(n for n in range(1, max(1, int(wanted)) + 1) if whole % n == 0)
            change = {"optim.batch_size": fewer, "optim.accumulation": whole // fewer}
        if wanted < 1:
            multiple = max(SHORTEST, plan.machine.length_multiple)
            length = int(length * max(wanted, 0)) // multiple * multiple
            if length < SHORTEST:
                return {}
            change = {"data.length": length} | change
    if room[EVALUATES] * conf.data.length / length < 1:
        prompts = int(conf.eval_prompts * room[EVALUATES] * conf.data.length / length)
        if prompts < 1:
            return {}
        change["eval_prompts"] = prompts
    return change


def _room(parts: Counter[str], limit: float) -> float:
    """Share of what comes and goes that there is room for, beside all that stays."""
    stays = sum(parts[part] for part in (*STAYS, BUCKETS))
    if parts[GRADIENTS]:
        stays += parts[TRAINED]  # at the end of a step there are gradients of all that is trained
    moves = parts.total() - sum(parts[part] for part in (*STAYS, BUCKETS, GRADIENTS))
    return (limit - stays) / moves


def changed(conf: Options, change: dict[str, int]) -> Options:
    for key, value in change.items():
        group, _, name = key.rpartition(".")
        part = replace(getattr(conf, group), **{name: value}) if group else value
        conf = replace(conf, **{group or name: part})
    return conf
