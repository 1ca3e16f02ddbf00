"""The table that compares several drafts: the costs and gains of each."""

from infer.measure.report_schema import ModeSection, Report
from infer.report.definitions import format_definitions
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_mean,
    format_millions,
    format_number,
)
from infer.report.prose import append_remarks

COSTS_NOTE = (
    f"{format_definitions('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are the tree's "
    "(of lookup: the chain's). Brackets: 95 % interval over prompts."
)


def side_by_side_table(report: Report) -> Table:
    """Build a table with a row for each draft: its costs and its gains."""
    autoregressive, ngram = report.autoregressive, report.ngram
    # The verification of an empty tree is an autoregressive step.
    step = ngram.costs_ms.autoregressive_step if ngram and ngram.costs_ms else None
    rows = [
        ["autoregressive", *[ABSENT] * 4, format_number(step), *_tau_cells(autoregressive, None)],
        ["n-gram lookup", "ngram", "0", ABSENT, *_cost_cells(ngram), *_tau_cells(ngram, None)],
    ] + [
        [
            draft.name,
            draft.method,
            format_millions(draft.parameters),
            format_millions(draft.memory_bytes.weights + draft.memory_bytes.state),
            *_cost_cells(draft.modes["tree"]),
            *_tau_cells(
                draft.modes["chain"], draft.modes["tree"], has_own_target=draft.target is not None
            ),
        ]
        for draft in report.drafts
    ]
    return Table(
        title="Drafts side by side",
        note=append_remarks(COSTS_NOTE, report),
        columns=[
            "draft", "method", "M params", "MB", "draft ms", "verify ms", "chain tau", "tree tau",
            "speed-up", "lossless",
        ],
        rows=rows,
        label_columns=2,
        stacked_headers=True,
    )  # fmt: skip


def _cost_cells(mode: ModeSection | None) -> list[str]:
    """Format milliseconds a round of the draft and of the verification."""
    costs = mode and mode.costs_ms
    return [format_number(costs.draft), format_number(costs.verify)] if costs else [ABSENT] * 2


def _tau_cells(
    chain: ModeSection | None, tree: ModeSection | None, *, has_own_target: bool = False
) -> list[str]:
    """Format tau of chain and tree, and speed-up and losslessness of the tree, else of the chain.

    With `has_own_target`, answers are compared with those of a target that the draft adapted.
    """
    main_mode = tree or chain
    return [
        *(format_mean(mode and mode.acceptance_length) for mode in (chain, tree)),
        format_estimate(main_mode and main_mode.speedup),
        format_lossless(main_mode) + (" (own)" if has_own_target else "") if main_mode else ABSENT,
    ]
