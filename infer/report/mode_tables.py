"""Tables of drafts and modes: acceptance, speed-up, gains and losslessness."""

from typing import get_args

from infer.measure.report_schema import GainMetric, ModeSection, Report, Section, TrainedMode
from infer.report.definitions import POSITION_COLUMN, format_definitions, get_definition
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_mean,
    format_millions,
    format_number,
    is_compared,
)
from infer.report.prose import append_remarks, explain_undecided
from infer.report.views import (
    ModeView,
    collect_sections,
    list_categories,
    list_measured_modes,
    list_modes,
    mode_label,
)

# More columns do not fit into 100 characters; report.json holds every position.
MAX_POSITIONS = 10
MODE_COLUMNS = ["tau", "delivered", "speed-up", "tokens/s", "lossless"]
# With them the terminal's table of one draft fits into 80 characters, unless verdicts are long;
# the verdict above it says how many tokens are delivered.
OVERVIEW_COLUMNS = ["tau", "speed-up", "lossless"]
MISMATCH_COLUMNS = [
    "mismatched", "near-tie gap", "explained gap", "beyond gap", "widest divergence",
]  # fmt: skip
COSTS_NOTE = (
    f"{format_definitions('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are the tree's "
    "(of lookup: the chain's). Brackets: 95 % interval over prompts."
)


def side_by_side_table(report: Report) -> Table:
    """Build a table of costs and speed-ups with a row for each draft and each mode without one."""
    autoregressive, ngram = report.autoregressive, report.ngram
    # The verification of an empty tree is an autoregressive step.
    step = ngram.costs_ms.autoregressive_step if ngram and ngram.costs_ms else None
    return Table(
        title="Drafts side by side",
        note=append_remarks(COSTS_NOTE, report),
        columns=[
            "draft", "method", "M params", "MB", "draft ms", "verify ms", "chain tau", "tree tau",
            "speed-up", "lossless",
        ],
        rows=[
            [
                "autoregressive", *[ABSENT] * 4, format_number(step),
                *_tau_cells(autoregressive, None),
            ],
            ["n-gram lookup", "ngram", "0", ABSENT, *_cost_cells(ngram), *_tau_cells(ngram, None)],
        ] + [
            [
                draft.name,
                draft.method,
                format_millions(draft.parameters),
                format_millions(draft.memory_bytes.weights + draft.memory_bytes.state),
                *_cost_cells(draft.modes["tree"]),
                *_tau_cells(
                    draft.modes["chain"], draft.modes["tree"],
                    has_own_target=draft.target is not None,
                ),
            ]
            for draft in report.drafts
        ],
        label_columns=2,
        stacked_headers=True,
    )  # fmt: skip


def summary_table(report: Report, *, main: bool = False) -> Table:
    """Build a table with a row for each mode of each category and of all prompts."""
    return Table(
        title="Modes by category",
        note=append_remarks(
            f"{format_definitions('tau', 'delivered', 'speed-up', 'tokens/s')} Brackets: 95 % "
            "interval over prompts; parentheses: their number.",
            report,
        ),
        columns=["prompts", "mode", *MODE_COLUMNS],
        rows=[
            _mode_row(name, section, view)
            for name, section in collect_sections(report).items()
            for view in list_modes(section, main=main)
        ],
        label_columns=2,
    )


def overview_table(report: Report) -> Table:
    """Build a table with all modes on all prompts, then the tree in each category."""
    return Table(
        title="Modes",
        note=append_remarks(
            "Brackets: 95 % interval over prompts; parentheses: their number.", report
        ),
        columns=["prompts", "mode", *OVERVIEW_COLUMNS],
        rows=[_mode_row("all", report, view, OVERVIEW_COLUMNS) for view in list_modes(report)]
        + [
            _mode_row(name, section, view, OVERVIEW_COLUMNS)
            for name, section in list_categories(report).items()
            for view in list_modes(section)
            if view.key.endswith("/tree")
        ],
        label_columns=2,
        footnotes=explain_undecided(report),
    )


def gain_table(sections: dict[str, Section], *, main: bool = False) -> Table:
    """Build a table of the gains of each draft's modes over others."""
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=[
            [
                name,
                f"{mode_label(section, draft, mode)} {baseline.replace('_', ' ')}",
                *(
                    format_estimate(gain[metric] if gain else None, signed=True)
                    for metric in get_args(GainMetric)
                ),
            ]
            for name, section in sections.items()
            for draft in section.drafts
            for mode, gains in draft.gain.items()
            if mode == "tree" or not main
            for baseline, gain in gains.items()
        ],
        label_columns=2,
    )


def acceptance_table(report: Report, *, main: bool = False) -> Table:
    """Build a table of the acceptance figures of all modes that draft tokens."""
    return Table(
        title="Acceptance",
        note=format_definitions("delivered", "tau per prompt", "acceptance rate"),
        columns=["mode", "tau", "delivered", "tau per prompt", "acceptance rate"],
        rows=[
            [
                label,
                format_estimate(mode.acceptance_length),
                format_estimate(mode.delivered_per_round),
                format_estimate(mode.acceptance_length_per_prompt),
                format_estimate(mode.acceptance_rate),
            ]
            for label, mode in list_measured_modes(report, main=main)
            if mode.depth
        ],
    )


def position_table(report: Report) -> Table:
    """Build a table of marginal and conditional acceptance at each draft position."""
    modes = [(label, mode) for label, mode in list_measured_modes(report) if mode.depth]
    depth = min(MAX_POSITIONS, max((mode.depth for _, mode in modes), default=0))
    return Table(
        title="Acceptance by position",
        note=f"{get_definition(POSITION_COLUMN)}.",
        columns=["mode", "share", *(str(position + 1) for position in range(depth))],
        rows=[
            [label, kind, *map(format_number, values[:depth]), *[""] * (depth - len(values))]
            for label, mode in modes
            for kind, values in vars(mode.acceptance_by_position).items()
        ],
        label_columns=2,
    )


def exactness_table(report: Report, *, main: bool = False) -> Table:
    """Build a table of the comparison with the answers of autoregressive decoding.

    With `main`, keep the main modes and any other mode whose answers differ.
    """
    main_labels = {label for label, _ in list_measured_modes(report, main=True)}
    return Table(
        title="Losslessness",
        note=append_remarks(
            "Answers compared with autoregressive decoding, token for token; in fp32 all must "
            f"match. {format_definitions('lossless')}",
            report,
        ),
        columns=["mode", "lossless", *MISMATCH_COLUMNS],
        rows=[
            [
                label,
                format_lossless(mode),
                *(_mismatch_cells(mode) if is_compared(mode) else [ABSENT] * len(MISMATCH_COLUMNS)),
            ]
            for label, mode in list_measured_modes(report)
            if not main or label in main_labels or mode.mismatched_prompts
        ],
        stacked_headers=True,
        footnotes=explain_undecided(report),
    )


def prompt_length_table(report: Report) -> Table:
    """Build a table with a row for each bucket of prompt lengths and each draft."""
    by_length = report.by_prompt_length
    return Table(
        title="Tau by prompt length",
        note="Prompt lengths are in tokens of the target.",
        columns=["prompt tokens", "draft", "prompts", "chain tau", "tree tau"],
        rows=[
            [
                f"up to {bucket.up_to:,}",
                name,
                str(bucket.prompts),
                *(format_estimate(taus[mode]) for mode in get_args(TrainedMode)),
            ]
            for bucket in by_length.buckets
            for name, taus in bucket.drafts.items()
        ],
        label_columns=3,
        footnotes=[
            f"{name}: the longest row that it was trained on is not known."
            if tokens is None
            else f"{name}: trained on rows of at most {tokens:,} tokens; it has seen no longer "
            "text."
            for name, tokens in by_length.longest_row.items()
        ],
    )


def _mode_row(
    name: str, section: Section, view: ModeView, columns: list[str] = MODE_COLUMNS
) -> list[str]:
    """Return the row of a mode on the prompts of a section."""
    cells = _mode_cells(view.mode) if view.mode else dict.fromkeys(columns, ABSENT)
    return [
        f"{name} ({section.autoregressive.prompts})",
        view.label,
        *(cells[column] for column in columns),
    ]


def _mode_cells(mode: ModeSection) -> dict[str, str]:
    return {
        "tau": format_estimate(mode.acceptance_length),
        "delivered": format_mean(mode.delivered_per_round),
        "speed-up": format_estimate(mode.speedup),
        "tokens/s": format_mean(mode.tokens_per_s, decimals=1),
        "lossless": format_lossless(mode),
    }


def _mismatch_cells(mode: ModeSection) -> list[str]:
    widest = max(mode.divergences, key=lambda divergence: divergence.logit_gap, default=None)
    return [
        f"{mode.mismatched_prompts} of {mode.prompts}",
        f"{mode.near_tie_gap:.3g}",
        f"{mode.explained_gap:.3g}",
        str(mode.divergences_beyond_gap),
        f"{widest.logit_gap:.3g} at {widest.prompt_id}:{widest.position}" if widest else ABSENT,
    ]


def _cost_cells(mode: ModeSection | None) -> list[str]:
    """Format milliseconds per round of the draft and of the verification."""
    costs = mode and mode.costs_ms
    return [format_number(costs.draft), format_number(costs.verify)] if costs else [ABSENT] * 2


def _tau_cells(
    chain: ModeSection | None, tree: ModeSection | None, *, has_own_target: bool = False
) -> list[str]:
    """Format tau of chain and tree, and speed-up and losslessness of the tree (or the chain).

    With `has_own_target`, answers are compared with those of a target that the draft adapted.
    """
    main_mode = tree or chain
    return [
        *(format_mean(mode and mode.acceptance_length) for mode in (chain, tree)),
        format_estimate(main_mode and main_mode.speedup),
        format_lossless(main_mode) + (" (own)" if has_own_target else "") if main_mode else ABSENT,
    ]
