"""Tables of the costs of decoding: latency, parts of a round, predicted speed-up, batches."""

from dataclasses import fields

from infer.measure.report_schema import BatchSection, Report, RoundCosts
from infer.report.definitions import format_definitions
from infer.report.levels import describe_levels
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_mean,
    format_number,
    format_percentiles,
)
from infer.report.views import list_measured_modes

BATCH_FIELDS = {field.name for field in fields(BatchSection)}
ROUND_PARTS = ("verify", "accept", "cache_move", "draft", "host")  # in the order in which they run


def latency_table(report: Report) -> Table:
    """Build a table of latency percentiles over prompts, for each mode."""
    return Table(
        title="Latency, ms",
        note=f"p50 / p90 / p99 over prompts. {format_definitions('TTFT', 'ITL', 'E2E')}",
        columns=["mode", "TTFT", "ITL", "E2E"],
        rows=[
            [label, *map(format_percentiles, (mode.ttft_ms, mode.itl_ms, mode.e2e_ms))]
            for label, mode in list_measured_modes(report)
        ],
    )


def efficiency_table(report: Report) -> Table:
    """Build a table of measured and predicted speed-up, and of the costs of a round."""
    return Table(
        title="Efficiency",
        note=format_definitions("efficiency", "predicted", "MBSU"),
        columns=[
            "mode", "speed-up", "predicted", "efficiency", "MBSU", "draft ms", "verify ms",
            "step ms", "new graphs",
        ],
        rows=[
            [
                label,
                format_mean(mode.speedup),
                format_number(mode.predicted_speedup),
                format_number(mode.efficiency),
                format_estimate(mode.mbsu),
                *map(format_number, (costs.draft, costs.verify, costs.autoregressive_step)),
                ABSENT if mode.graphs_after_warmup is None else str(mode.graphs_after_warmup),
            ]
            for label, mode in list_measured_modes(report)
            if (costs := mode.costs_ms)
        ],
    )  # fmt: skip


def split_table(report: Report, *, main: bool = False) -> Table:
    """Build a table of the parts of a round.

    Footnotes name the bottleneck of each main mode, and the levels of each chain that pay.
    """
    return Table(
        title="Where a round's time goes, ms",
        note="Parts of the unfused round, timed one after the other. "
        + format_definitions("sum", "round", "fused round", "level ms", "level steps"),
        columns=[
            "mode", *(part.replace("_", " ") for part in ROUND_PARTS), "sum", "round",
            "fused round", "level ms", "level steps",
        ],
        rows=[
            [
                label,
                *(format_number(getattr(split, part)) for part in ROUND_PARTS),
                format_number(sum(getattr(split, part) for part in ROUND_PARTS)),
                format_number(split.round),
                format_number(split.fused_round),
                *_level_cells(mode.costs_ms),
            ]
            for label, mode in list_measured_modes(report, main=main)
            if (split := mode.split_ms)
        ],
        footnotes=[
            f"{label}: {mode.bottleneck}"
            for label, mode in list_measured_modes(report, main=True)
            if mode.bottleneck
        ]
        + [*describe_levels(report)],
        stacked_headers=True,
    )  # fmt: skip


def _level_cells(costs: RoundCosts | None) -> list[str]:
    """Format what drafting a level costs, in milliseconds and in autoregressive steps."""
    if costs is None or costs.level is None:
        return [ABSENT] * 2
    return [format_number(costs.level), format_number(costs.level / costs.autoregressive_step)]


def batch_table(report: Report) -> Table:
    """Build a table of each draft's tree at every batch size, from one row up."""
    return Table(
        title="Speed-up against batch size",
        note="Tree and autoregressive decoding with that many rows at a time, all rows together. "
        "Brackets: 95 % interval over prompts. Answers are compared with autoregressive decoding "
        "of one row.",
        columns=[
            "draft", "batch", "speed-up", "tokens/s", "autoregressive tokens/s", "tau", "lossless",
        ],
        rows=[
            [
                row.draft,
                str(row.batch),
                format_estimate(row.speedup),
                format_mean(row.tokens_per_s, decimals=1),
                format_mean(row.autoregressive_tokens_per_s, decimals=1),
                format_mean(row.acceptance_length),
                format_lossless(row),
            ]
            for row in collect_batch_rows(report)
        ],
        label_columns=2,
        stacked_headers=True,
    )  # fmt: skip


def collect_batch_rows(report: Report) -> list[BatchSection]:
    """Return rows by draft and batch size; the mode `tree` is the row of batch 1.

    A draft without measured batches has no rows.
    """
    rows = []
    for draft in report.drafts:
        batches = [batch for batch in report.batches if batch.draft == draft.name]
        tree = draft.modes["tree"]
        baseline = draft.modes.get("autoregressive") or report.autoregressive
        if batches and tree and tree.speedup:
            shared = {name: value for name, value in vars(tree).items() if name in BATCH_FIELDS}
            shared["autoregressive_tokens_per_s"] = baseline.tokens_per_s
            rows.append(BatchSection(**shared, draft=draft.name, mode="tree"))
        rows += sorted(batches, key=lambda batch: batch.batch)
    return rows


def replay_table(report: Report) -> Table:
    """Build a table of tau as replayed on the target's own text, for each draft."""
    return Table(
        title="Replay of the target's own text",
        note=format_definitions("on-policy tau", "all-positions tau"),
        columns=["draft", "on-policy tau", "all-positions tau"],
        rows=[
            [name, format_estimate(replay.tau), format_estimate(replay.all_positions)]
            for name, replay in report.replay.items()
        ],
    )
