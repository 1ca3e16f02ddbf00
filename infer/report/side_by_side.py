"""The table that compares several drafts: the costs and gains of each."""

from infer.report.definitions import format_definitions
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_millions,
    format_number,
)
from infer.report.prose import append_remarks
from infer.report.views import ModeDict, ReportDict

COSTS_NOTE = (
    f"{format_definitions('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are the tree's "
    "(of lookup: the chain's). Brackets: 95 % interval over prompts."
)


def side_by_side_table(report: ReportDict) -> Table:
    """Build a table with a row for each draft: its costs and its gains."""
    ngram = report["ngram"]
    rows = [
        [
            "autoregressive",
            *[ABSENT] * 4,
            _step_cell(ngram),
            *_tau_cells(report["autoregressive"], None),
        ],
        ["n-gram lookup", "ngram", "0", ABSENT, *_cost_cells(ngram), *_tau_cells(ngram, None)],
    ] + [
        [
            draft["name"],
            draft["method"],
            format_millions(draft["parameters"]),
            format_millions(sum(draft["memory_bytes"].values())),
            *_cost_cells(draft["modes"]["tree"]),
            *_tau_cells(
                draft["modes"]["chain"],
                draft["modes"]["tree"],
                has_own_target=draft["target"] is not None,
            ),
        ]
        for draft in report["drafts"]
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


def _cost_cells(mode: ModeDict | None) -> list[str]:
    """Format milliseconds a round of the draft and of the verification."""
    costs = mode and mode["costs_ms"]
    return [format_number(costs[key]) if costs else ABSENT for key in ("draft", "verify")]


def _step_cell(ngram: ModeDict | None) -> str:
    """Format milliseconds of an autoregressive step: the verification of an empty tree."""
    costs = ngram and ngram["costs_ms"]
    return format_number(costs["autoregressive_step"]) if costs else ABSENT


def _tau_cells(
    chain: ModeDict | None, tree: ModeDict | None, *, has_own_target: bool = False
) -> list[str]:
    """Format tau of chain and tree, and speed-up and losslessness of the tree, else of the chain.

    With `has_own_target`, answers are compared with those of a target that the draft adapted.
    """
    main_mode = tree or chain
    taus = [mode and mode["acceptance_length"] for mode in (chain, tree)]
    return [
        *(format_number(tau["mean"]) if tau else ABSENT for tau in taus),
        format_estimate(main_mode and main_mode["speedup"]),
        format_lossless(main_mode) + (" (own)" if has_own_target else "") if main_mode else ABSENT,
    ]
