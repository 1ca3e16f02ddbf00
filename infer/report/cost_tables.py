"""Tables of the costs of decoding: latency, parts of a round, predicted speed-up, batches."""

from infer.report.definitions import format_definitions
from infer.report.mode_tables import list_measured_modes
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_number,
    format_percentiles,
)
from infer.report.prose import list_bottlenecks
from infer.report.views import ModeDict, ReportDict

ROUND_PARTS = ("verify", "accept", "cache_move", "draft", "host")  # in the order in which they run


def latency_table(report: ReportDict) -> Table:
    """Build a table of latency percentiles over prompts, for each mode."""
    rows = [
        [label, *(format_percentiles(mode[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))]
        for label, mode in list_measured_modes(report)
    ]
    return Table(
        title="Latency, ms",
        note=f"p50 / p90 / p99 over prompts. {format_definitions('TTFT', 'ITL', 'E2E')}",
        columns=["mode", "TTFT", "ITL", "E2E"],
        rows=rows,
    )


def efficiency_table(report: ReportDict) -> Table:
    """Build a table of measured and predicted speed-up and of the costs behind them."""
    rows = [
        [
            label,
            format_number(mode["speedup"] and mode["speedup"]["mean"]),
            format_number(mode["predicted_speedup"]),
            format_number(mode["efficiency"]),
            format_estimate(mode["mbsu"]),
            *(format_number(costs[key]) for key in ("draft", "verify", "autoregressive_step")),
            ABSENT if mode["graphs_after_warmup"] is None else str(mode["graphs_after_warmup"]),
        ]
        for label, mode in list_measured_modes(report)
        if (costs := mode["costs_ms"])
    ]
    return Table(
        title="Efficiency",
        note=format_definitions("efficiency", "predicted", "MBSU"),
        columns=[
            "mode", "speed-up", "predicted", "efficiency", "MBSU", "draft ms", "verify ms",
            "step ms", "new graphs",
        ],
        rows=rows,
    )  # fmt: skip


def split_table(report: ReportDict, *, main: bool = False) -> Table:
    """Build a table of the parts of a round, with the bottleneck of each main mode below."""
    return Table(
        title="Where a round's time goes, ms",
        note="Parts of the unfused round, timed one after the other. "
        + format_definitions("sum", "round", "fused round"),
        columns=[
            "mode", *(part.replace("_", " ") for part in ROUND_PARTS), "sum", "round",
            "fused round",
        ],
        rows=[
            [
                label,
                *(format_number(split[part]) for part in ROUND_PARTS),
                format_number(sum(split[part] for part in ROUND_PARTS)),
                format_number(split["round"]),
                format_number(split["fused_round"]),
            ]
            for label, mode in list_measured_modes(report, main=main)
            if (split := get_split(mode))
        ],
        footnotes=list_bottlenecks(report),
    )  # fmt: skip


def get_split(mode: ModeDict) -> dict[str, float] | None:
    """Return the parts of a round, or None if they were not timed; older reports lack the key."""
    return mode.get("split_ms")


def batch_table(report: ReportDict) -> Table:
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
                row["draft"],
                str(row["batch"]),
                format_estimate(row["speedup"]),
                f"{row['tokens_per_s']['mean']:.1f}",
                f"{row['autoregressive_tokens_per_s']['mean']:.1f}",
                format_number(row["acceptance_length"]["mean"]),
                format_lossless(row),
            ]
            for row in collect_batch_rows(report)
        ],
        label_columns=2,
        stacked_headers=True,
    )  # fmt: skip


def collect_batch_rows(report: ReportDict) -> list[dict]:
    """Collect rows by draft and batch size; the mode `tree` is the row of batch 1.

    A draft without measured batches has no rows.
    """
    batches = report.get("batches", [])
    rows = []
    for draft in report["drafts"]:
        draft_batches = [batch for batch in batches if batch["draft"] == draft["name"]]
        tree, baseline = draft["modes"]["tree"], draft["modes"].get("autoregressive")
        if draft_batches and tree and tree["speedup"]:
            baseline = baseline or report["autoregressive"]
            speed = {"autoregressive_tokens_per_s": baseline["tokens_per_s"]}
            rows.append({**tree, "draft": draft["name"], "batch": 1, "mode": "tree"} | speed)
        rows += sorted(draft_batches, key=lambda batch: batch["batch"])
    return rows


def replay_table(report: ReportDict) -> Table:
    """Build a table of tau as replayed on the target's own text, for each draft."""
    return Table(
        title="Replay of the target's own text",
        note=format_definitions("on-policy tau", "all-positions tau"),
        columns=["draft", "on-policy tau", "all-positions tau"],
        rows=[
            [name, format_estimate(replay["tau"]), format_estimate(replay["all_positions"])]
            for name, replay in report.get("replay", {}).items()
        ],
    )
