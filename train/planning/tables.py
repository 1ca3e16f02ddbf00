"""A plan as people read it, and as JSON."""

import math
from collections import Counter
from typing import Any

from rich.console import Console

from infer.report.number_format import Table, rich_table
from train.planning.layout import BUCKETS, held
from train.planning.plan import Option, Plan, graphs_of
from train.planning.trace import CACHE, FROZEN, GRADIENTS, OPTIMIZER, TARGET, TRAINED

CONSOLE = Console(soft_wrap=True, highlight=False)
PARTS = (TARGET, FROZEN, TRAINED, GRADIENTS, BUCKETS, OPTIMIZER, "activations", "logits", CACHE)
DAY, HOUR, MINUTE = 86400, 3600, 60
MIB, GIB = 2**20, 2**30


def show(plan: Plan, console: Console, changes: list[str]) -> None:
    for table in (size_table(plan), layout_table(plan), memory_table(plan), time_table(plan)):
        if table.rows:
            console.print(f"\n{table.title}")
            console.print(rich_table(table, ruled=True))
            for line in table.below:
                console.print(line)
    console.print(f"\n{verdict(plan, changes)}")


def verdict(plan: Plan, changes: list[str]) -> str:
    """Whether it fits, and if not, what to change."""
    best, size = plan.best, plan.machine.core_bytes
    room = f"{gib(plan.limit)} of {gib(size)} GiB a core"
    if plan.fits(best):
        return f"It fits: {gib(best.total)} GiB of {room}. Start {launch(plan)}"
    remedy = f"with {' '.join(changes)} it does" if changes else "choose a larger machine"
    return f"It does not fit: {gib(best.total)} GiB of {room}; {remedy}"


def launch(plan: Plan) -> str:
    """What to start, and what would use cores that are left over."""
    found, cores = plan.best.layout, plan.machine.all_cores
    idle = ""
    if found.processes < cores:
        rows = cores // found.tensor
        idle = f"; {cores - found.processes} cores have no rows: {rows} rows a step would use all"
    return f"{found.processes} processes, parallel.tensor={found.tensor}{idle}"


def size_table(plan: Plan) -> Table:
    sizes, machine = plan.sizes, plan.machine
    states = "three" if plan.conf.states == 3 else "two"
    cores = f"{machine.chips} x {machine.cores} cores of {gib(machine.core_bytes)} GiB"
    fast = f"{machine.core_bytes_s / 1e9:,.0f} GB/s and {machine.core_flops(plan.dtype) / 1e12:.4g}"
    return Table(
        title=f"{plan.conf.run_name} on {machine.name}: {cores}, {fast} TFLOP/s "
        f"{str(plan.dtype).removeprefix('torch.')} each",
        note="",
        columns=["", "", ""],
        rows=[
            ["target", plan.conf.target.path or plan.conf.target.name, parameters(sizes.target)],
            ["draft", plan.conf.draft.method, parameters(sizes.draft)],
            ["of these trained", "", parameters(sizes.trained)],
            ["features", _needs(sizes.layers), f"{sizes.feature_bytes:,} bytes a token"],
            ["graphs", "to compile, without the final evaluation's", str(graphs_of(plan))],
            ["disk", f"{states} states, two checkpoints", f"{sizes.disk / 1e9:.1f} GB"],
        ],
        labels=2,
    )


def _needs(layers: list[int]) -> str:
    captured = f" and what enters layers {', '.join(map(str, layers))}" if layers else ""
    return f"the final hidden state{captured}"


def layout_table(plan: Plan) -> Table:
    """Every layout: what fits, and how fast it could be."""
    rows = []
    for option in plan.options:
        found, fits = option.layout, "yes" if plan.fits(option) else "no"
        if option.trace is None and option.least <= plan.limit:
            fits = ""
        rates = [rate(seconds, plan) for seconds in _seconds(option)] or ["", "", ""]
        total = gib(option.total) if option.trace else f"> {gib(option.total)}"
        mark = "*" if option is plan.best else ""
        batch = f"{found.rows} x {found.micros}"
        rows.append([f"{mark}{found.tensor}", str(found.data), batch, total, fits, *rates])
    return Table(
        title="Layouts: cores that share the target x groups of them with rows of their own",
        note="",
        columns=[
            "tensor", "data", "rows x micro-batches", "GiB a core", "fits",
            "tokens/s, arithmetic", "tokens/s, bandwidth", "tokens/s, links",
        ],
        rows=rows,
        stacked=True,
        below=["* proposed; without figures: too large whatever the rows, or fewer cores do"],
    )  # fmt: skip


def memory_table(plan: Plan) -> Table:
    """The proposed layout: GiB of a core by part, at the fullest moment of each phase."""
    best = plan.best
    phases = {"every step": held(best.lasting, best.layout)}
    if best.trace is not None:
        phases = {name: held(phase, best.layout) for name, phase in best.trace.phases.items()}
    unit, size = ("GiB", GIB) if best.total >= GIB else ("MiB", MIB)
    rows = [
        [part, *(f"{parts[part] / size:.2f}" for parts in phases.values())]
        for part in PARTS
        if any(parts[part] for parts in phases.values())
    ]
    rows.append(["in all", *(f"{parts.total() / size:.2f}" for parts in phases.values())])
    return Table(
        title=f"{unit} a core, at the fullest moment of each phase",
        note="",
        columns=["", *phases],
        rows=rows,
    )


def time_table(plan: Plan) -> Table:
    best = plan.best
    if best.speed is None:
        return Table(title="", note="", columns=[], rows=[])
    seconds, steps = best.speed.bound, planned_steps(plan)
    rows = [["a step", f"{step_tokens(plan):,} tokens", f"{seconds:.3g} s"]]
    if steps is None:
        rows.append(["the run", f"{plan.conf.optim.epochs:g} epochs", "give the data's tokens=N"])
    else:
        rows.append(["the run", f"{steps:,} steps", duration(steps * seconds)])
    if plan.conf.tokens is not None:
        took = plan.conf.tokens / step_tokens(plan) * seconds
        rows.append(["the data set, once", f"{plan.conf.tokens:,.0f} tokens", duration(took)])
        features = plan.conf.tokens * plan.sizes.feature_bytes / 1e9
        rows.append(["its features", "on disk", f"{features:,.0f} GB"])
    return Table(title="Time at best", note="", columns=["", "", ""], rows=rows, labels=2)


def planned_steps(plan: Plan) -> int | None:
    """Return the steps of the run; of epochs, about as many as full rows would take."""
    optim, tokens = plan.conf.optim, plan.conf.tokens
    if optim.epochs is None:
        return optim.total_steps(rows=0)
    if tokens is None:
        return None
    return optim.total_steps(rows=math.ceil(tokens / plan.conf.data.length))


def step_tokens(plan: Plan) -> int:
    optim = plan.conf.optim
    return optim.batch_size * optim.accumulation * plan.conf.data.length


def rate(seconds: float, plan: Plan) -> str:
    return f"{step_tokens(plan) / seconds:,.0f}" if seconds else "-"


def _seconds(option: Option) -> list[float]:
    return list(vars(option.speed).values()) if option.speed else []


def gib(size: float | int) -> str:
    """Bytes as GiB.

    >>> gib(1.5 * 2**30)
    '1.50'
    """
    return f"{size / GIB:.2f}"


def parameters(count: int) -> str:
    """Their number, by thousands.

    >>> parameters(1_720_574_976)
    '1.721 B'
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3f} {letter}"
    return str(count)


def duration(seconds: float) -> str:
    """In the unit that suits it.

    >>> [duration(s) for s in (5.0, 300.0, 7200.0, 400_000.0)]
    ['5 s', '5 min', '2 h', '4.63 days']
    """
    for size, unit in ((2 * DAY, "days"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{seconds / (DAY if unit == 'days' else size):.3g} {unit}"
    return f"{seconds:.3g} s"


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    best = plan.best
    return {
        "machine": vars(plan.machine) | {"dtype": str(plan.dtype).removeprefix("torch.")},
        "sizes": vars(plan.sizes),
        "graphs": graphs_of(plan),
        "limit_bytes": round(plan.limit),
        "fits": plan.fits(best),
        "proposed": plan.options.index(best),
        "layouts": [_layout_json(option, plan) for option in plan.options],
    }


def _layout_json(option: Option, plan: Plan) -> dict[str, Any]:
    phases: dict[str, Counter[str]] = {}
    if option.trace is not None:
        phases = {n: held(phase, option.layout) for n, phase in option.trace.phases.items()}
    weights = {"target": option.layout.target.name, "draft": option.layout.draft.name}
    return (
        vars(option.layout)
        | weights
        | {
            "fits": plan.fits(option),
            "bytes": option.total,
            "phases": phases,
            "step_s": vars(option.speed) if option.speed else None,
            "step_tokens": step_tokens(plan),
        }
    )
