"""Tables of the costs of decoding: parts of a round with the speed-up that they predict, and batches."""

from infer.engine.phase_timer import PHASES
from infer.report.definitions import format_definitions
from infer.report.number_format import Table, format_estimate, format_lossless, format_mean, format_number
from infer.report.prose import describe_bottlenecks
from infer.report.views import find_baseline, list_modes
from infer.results.schema import Report


def split_table(report: Report) -> Table:
    """Build a table of the parts of a round and their prediction; footnotes name the bottleneck of each main mode."""
    records = (
        {
            "mode": view.label,
            **{part.replace("_", " "): format_number(getattr(split, part)) for part in PHASES},
            "round": format_number(split.round),
            "fused round": format_number(split.fused_round),
            "predicted": format_number(view.mode.figures.predicted_speedup),
            "efficiency": format_number(view.mode.figures.efficiency),
        }
        for view in list_modes(report)
        if (split := view.mode.split_ms)
    )
    return Table.from_records(
        records,
        title="Where a round's time goes, ms",
        note="Parts of the unfused round, timed one after the other. "
        + format_definitions("round", "fused round", "predicted", "efficiency"),
        footnotes=describe_bottlenecks(report),
        stacked_headers=True,
    )


def batch_table(report: Report) -> Table:
    """Build a table of each draft's tree at every batch size, from one row up."""
    records = []
    for draft in report.drafts:
        tree = report.overall.modes[f"{draft.name}/tree"]
        one_row = (1, tree.figures, find_baseline(report, draft).figures.tokens_per_s, tree.verdict)
        lines = [(b.size, b, b.autoregressive_tokens_per_s, b.verdict) for b in draft.batches]
        records += [
            {
                "draft": draft.name,
                "batch": str(size),
                "speed-up": format_estimate(figures.speedup),
                "tokens/s": format_mean(figures.tokens_per_s, decimals=1),
                "autoregressive tokens/s": format_mean(plain_tokens_per_s, decimals=1),
                "tau": format_mean(figures.acceptance_length),
                "lossless": format_lossless(verdict, draft),
            }
            for size, figures, plain_tokens_per_s, verdict in [one_row, *lines]
            if lines
        ]
    return Table.from_records(
        records,
        title="Speed-up against batch size",
        note="Tree and autoregressive decoding with that many rows at a time, all rows together. "
        "Brackets: 95 % interval over prompts. Answers are compared with autoregressive decoding "
        "of one row.",
        label_columns=2,
        stacked_headers=True,
    )
