"""Tables and JSON of a plan."""

import math

from infer.report.number_format import Table, choose_console, format_millions, to_rich_table
from models.device.machine_specs import core_flops
from models.io.console import CONSOLE, print_line
from models.targets.stored_weights import stays_quantized
from train.config.run import Weights
from train.distributed.units import count_largest_bytes
from train.optim import trained_parameters
from train.planning.fake_process import (
    FROZEN,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    SPLIT_HEADS,
    TARGET,
    TRAINED,
    list_split_heads,
)
from train.planning.remedies import suggest_overrides
from train.planning.run_plan import LayoutOption, MachinePlan, count_graphs
from train.planning.trace import CACHE
from train.run.folder import disk_bytes_needed

MEMORY_PARTS = (TARGET, FROZEN, TRAINED, GATHERED, SPLIT_HEADS, GRADIENTS, OPTIMIZER, "activations", "logits", CACHE)
DAY, HOUR, MINUTE = 86400, 3600, 60
MIB, GIB = 2**20, 2**30


def print_plan(plan: MachinePlan) -> None:
    """Print the tables of a plan, and whether it fits or which changes make it fit."""
    console = choose_console(CONSOLE)
    for table in (size_table(plan), layout_table(plan), memory_table(plan), time_table(plan)):
        if table.rows:
            print_line(f"\n{table.title}")
            console.print(to_rich_table(table, ruled=console.is_terminal))
            for footnote in table.footnotes:
                print_line(footnote)
    print_line(f"\n{describe_fit(plan)}")


def describe_fit(plan: MachinePlan) -> str:
    """Describe in a sentence whether the run fits, and if not, what to change."""
    best, size = plan.best, plan.machine.core_bytes
    limit = f"{format_gib(plan.byte_limit)} of {format_gib(size)} GiB per core"
    if plan.fits(best):
        return f"It fits: {format_gib(best.peak_bytes)} GiB of {limit}. Start {describe_launch(plan)}"
    changes = suggest_overrides(plan)
    remedy = f"with {' '.join(changes)} it does" if changes else "choose a larger machine"
    return f"It does not fit: {format_gib(best.peak_bytes)} GiB of {limit}; {remedy}"


def describe_launch(plan: MachinePlan) -> str:
    """Describe the processes to start, and the rows that would leave no core idle and none that repeats another."""
    layout, cores = plan.best.layout, plan.machine.total_cores
    idle, advice = cores - layout.processes, ""
    if idle:
        is_dealt = plan.conf.device.is_native and layout.target is not Weights.sharded
        rows = cores if is_dealt else cores // layout.tensor
        advice = f"; {idle} cores have no rows: {rows} rows per step would use all"
    elif not layout.deal.is_even:
        advice = f"; {layout.deal.copies} cores learn the same rows: {cores} rows per step would give each its own"
    keys = " ".join([f"parallel.tensor={layout.tensor}", *plan.choices])
    return f"{layout.processes} processes, {keys}{advice}"


def size_table(plan: MachinePlan) -> Table:
    (target, draft), machine = plan.models, plan.machine
    cores = f"{machine.chips} x {machine.cores} cores of {format_gib(machine.core_bytes)} GiB"
    fast = f"{machine.core_bandwidth / 1e9:,.0f} GB/s and {core_flops(machine, plan.dtype) / 1e12:.4g}"
    layers = ", ".join(map(str, draft.needs.layers))
    layout, name = plan.best.layout, plan.conf.target.path or plan.conf.target.name
    if stays_quantized(target.model.config):
        name += ", quantized, counted in full precision"
    largest = count_largest_bytes(draft, plan.dtype, list_split_heads(draft, layout)) if layout.gathers_draft else 0
    needs = "the final hidden state" + (f" and what enters layers {layers}" if layers else "")
    return Table(
        title=f"{plan.conf.run_name} on {machine.name}: {cores}, {fast} TFLOP/s "
        f"{str(plan.dtype).removeprefix('torch.')} each",
        columns=["", "", ""],
        rows=[
            ["target", name, f"{format_millions(target.num_parameters)} M"],
            ["draft", plan.conf.draft.method, f"{format_millions(sum(p.numel() for p in draft.parameters()))} M"],
            ["of these trained", "", f"{format_millions(sum(p.numel() for p in trained_parameters(draft)))} M"],
            *([["gathered at once, at most", "a layer of the draft", f"{largest / 1e9:.2f} GB"]] * bool(largest)),
            ["features", needs, f"{plan.feature_bytes:,} bytes per token"],
            ["graphs", "to compile, without the final evaluation's", str(count_graphs(plan))],
            ["disk", "two states, two checkpoints", f"{disk_bytes_needed(draft, target) / 1e9:.1f} GB"],
        ],
        label_columns=2,
    )


def layout_table(plan: MachinePlan) -> Table:
    """Tabulate whether each layout fits, and how fast it could be."""
    return Table.from_records(
        (_describe_option(option, plan) for option in plan.options),
        title="Layouts: cores that share the target x groups of them with rows of their own",
        stacked_headers=True,
        footnotes=["* proposed; without figures: too large for any rows, or fewer cores suffice"],
    )


def _describe_option(option: LayoutOption, plan: MachinePlan) -> dict[str, str]:
    layout, fits = option.layout, "yes" if plan.fits(option) else "no"
    if not option.phases and option.peak_bytes <= plan.byte_limit:
        fits = ""
    tokens, limits = tokens_per_step(plan), option.step_time
    rates = {name: f"{tokens / seconds:,.0f}" if seconds else "-" for name, seconds in limits.items()}
    return {
        "tensor": f"{'*' if option is plan.best else ''}{layout.tensor}",
        "data": str(layout.data),
        "rows x micro-batches": f"{layout.rows} x {layout.micros}",
        "GiB per core": ("" if option.phases else "> ") + format_gib(option.peak_bytes),
        "fits": fits,
        **{f"tokens/s, {name}": rates.get(name, "") for name in ("arithmetic", "bandwidth", "links")},
    }


def memory_table(plan: MachinePlan) -> Table:
    """Tabulate the proposed layout's memory per core by part, at the peak of each phase."""
    phases = plan.best.memory_by_phase
    unit, size = ("GiB", GIB) if plan.best.peak_bytes >= GIB else ("MiB", MIB)
    rows = [
        [part, *(f"{parts[part] / size:.2f}" for parts in phases.values())]
        for part in MEMORY_PARTS
        if any(parts[part] for parts in phases.values())
    ]
    return Table(
        title=f"{unit} per core, at the fullest moment of each phase",
        columns=["", *phases],
        rows=[*rows, ["in all", *(f"{parts.total() / size:.2f}" for parts in phases.values())]],
    )


def time_table(plan: MachinePlan) -> Table:
    best = plan.best
    if not best.step_time:
        return Table(title="", columns=[], rows=[])
    seconds, steps = max(best.step_time.values()), planned_steps(plan)
    rows = [
        ["a step", f"{tokens_per_step(plan):,} tokens", f"{seconds:.3g} s"],
        ["the run", f"{plan.conf.optim.epochs:g} epochs", "give the data's tokens=N"]
        if steps is None
        else ["the run", f"{steps:,} steps", format_duration(steps * seconds)],
    ]
    if (tokens := plan.conf.tokens) is not None:
        epoch_time = format_duration(tokens / tokens_per_step(plan) * seconds)
        rows += [
            ["the data set, once", f"{tokens:,.0f} tokens", epoch_time],
            ["its features", "on disk", f"{tokens * plan.feature_bytes / 1e9:,.0f} GB"],
        ]
    return Table(title="Time at best", columns=["", "", ""], rows=rows, label_columns=2)


def planned_steps(plan: MachinePlan) -> int | None:
    """Return the steps of the run, None if they depend on unknown tokens; with epochs, as without padding."""
    optim, tokens = plan.conf.optim, plan.conf.tokens
    if optim.epochs is not None and tokens is None:
        return None
    return optim.total_steps(rows=math.ceil((tokens or 0) / plan.conf.data.row_length))


def tokens_per_step(plan: MachinePlan) -> int:
    return plan.conf.optim.rows_per_step * plan.conf.data.row_length


def format_gib(size: float | int) -> str:
    """Format bytes as GiB.

    >>> format_gib(1.5 * 2**30)
    '1.50'
    """
    return f"{size / GIB:.2f}"


def format_duration(seconds: float) -> str:
    """Format a duration in a unit that suits it.

    >>> [format_duration(s) for s in (5.0, 300.0, 7200.0, 400_000.0)]
    ['5 s', '5 min', '2 h', '4.63 days']
    """
    for minimum, size, unit in ((2 * DAY, DAY, "days"), (HOUR, HOUR, "h"), (MINUTE, MINUTE, "min")):
        if seconds >= minimum:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
