"""What to change where a run does not fit: overrides that were tried, and with which it does."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models.device.memory_trace import LOGITS
from train.distributed.parallel import ParallelConf, Weights
from train.planning.layout import BUCKETS, held, layout
from train.planning.plan import Option, Options, Plan, follow
from train.planning.trace import EVALUATES, GRADIENTS, STAYS, TRAINED

TRIES = 6  # of a layout: one thing is changed at a time, in proportion, which may be too little
FEWEST_LOGITS = 16  # chunks that one is split into, before rows are
SHORTEST = 128  # tokens of a row


def changes(plan: Plan) -> list[str]:
    """Overrides of the first layout that can be made to fit, by itself or with a sharded draft."""
    for conf, option, before in _tries(plan):
        found = _changes(plan, conf, option)
        if found is not None:
            made = before | found
            return [f"{key}={value}" for key, value in made.items()]
    return []


def _tries(plan: Plan) -> Iterator[tuple[Options, Option, dict[str, Any]]]:
    """Configurations to begin with: as it is, a draft in parts, both in parts over all cores."""
    conf, alone = plan.conf, plan.options[0]
    for option in plan.options:
        yield conf, option, {"parallel.tensor": option.layout.tensor}
    if conf.parallel != ParallelConf(tensor=conf.parallel.tensor) or conf.draft.adapts:
        return
    parallel = replace(conf.parallel, draft=Weights.sharded)
    for option in plan.options:
        change = {"parallel.tensor": option.layout.tensor, "parallel.draft": "sharded"}
        parts = replace(option.layout, draft=Weights.sharded)
        yield replace(conf, parallel=parallel), Option(layout=parts, lasting=option.lasting), change
    if conf.parallel.tensor > 1:
        return
    rows = max(conf.optim.rows, plan.machine.all_cores)
    change = {"parallel": "sharded", "optim.batch_size": 1, "optim.accumulation": rows}
    conf = changed(conf, {key: value for key, value in change.items() if "." in key})
    conf = replace(conf, parallel=replace(parallel, target=Weights.sharded))
    spread = layout(conf, plan.machine, alone.layout.blocks, 1)
    yield conf, Option(layout=spread, lasting=alone.lasting), change


def _changes(plan: Plan, conf: Options, option: Option) -> dict[str, int] | None:
    """Of one layout, tried; None where it cannot be made to fit."""
    if option.least > plan.limit:
        return None
    option, made = replace(option), dict[str, int]()
    if option.trace is None:
        follow(option, conf, plan.machine, plan.dtype)
    for _ in range(TRIES):
        if plan.fits(option):
            return made
        change = _change(conf, option, plan)
        if not change:
            return None
        made |= change
        conf = changed(conf, change)
        smaller = layout(conf, plan.machine, option.layout.blocks, option.layout.tensor)
        option = Option(layout=smaller, lasting=option.lasting)
        follow(option, conf, plan.machine, plan.dtype)
    return made if plan.fits(option) else None


def _change(conf: Options, option: Option, plan: Plan) -> dict[str, int]:
    """What is too much, less of it in proportion; nothing where there is no less."""
    assert option.trace is not None
    phases = [
        Moves.of(name, held(phase, option.layout)) for name, phase in option.trace.phases.items()
    ]
    evaluation = next(moves for moves in phases if moves.phase == EVALUATES)
    tight = min(phases, key=lambda moves: moves.room(plan.limit))
    if tight.room(plan.limit) >= 1:
        return {}
    if tight is evaluation:
        prompts = int(conf.eval_prompts * evaluation.room(plan.limit))
        return {"eval_prompts": prompts} if prompts >= 1 else {}
    spare = plan.limit - tight.stays - tight.others
    if spare >= tight.logits / FEWEST_LOGITS:
        return {"loss.chunk": max(1, int(conf.loss.chunk * spare / tight.logits))}
    wanted = option.layout.rows * tight.room(plan.limit)
    if option.layout.rows > 1:
        rows = conf.optim.rows
        fewer = max(n for n in range(1, max(1, int(wanted)) + 1) if rows % n == 0)
        return {"optim.batch_size": fewer, "optim.accumulation": rows // fewer}
    multiple = max(SHORTEST, plan.machine.length_multiple)
    length = int(conf.data.length * wanted) // multiple * multiple
    return {"data.length": length} if length >= SHORTEST else {}


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Bytes of a phase: what stays whatever its sizes, what comes and goes with them."""

    phase: str
    stays: int
    logits: int
    others: int

    @classmethod
    def of(cls, phase: str, parts: Counter[str]) -> "Moves":
        stays = sum(parts[part] for part in (*STAYS, BUCKETS, GRADIENTS))
        if phase != EVALUATES:  # at the end of a step there are gradients of all that is trained
            stays += max(0, parts[TRAINED] - parts[GRADIENTS])
        moves = parts.total() - sum(parts[part] for part in (*STAYS, BUCKETS, GRADIENTS))
        return cls(phase=phase, stays=stays, logits=parts[LOGITS], others=moves - parts[LOGITS])

    def room(self, limit: float) -> float:
        """Share of what comes and goes that there is room for."""
        return (limit - self.stays) / (self.logits + self.others)


def changed(conf: Options, change: dict[str, int]) -> Options:
    for key, value in change.items():
        group, _, name = key.rpartition(".")
        part = replace(getattr(conf, group), **{name: value}) if group else value
        conf = replace(conf, **{group or name: part})
    return conf
