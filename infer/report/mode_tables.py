"""Tables of drafts and modes: speed-up, gains and losslessness."""

from collections.abc import Iterable
from typing import get_args

from infer.report.definitions import format_definitions
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
from infer.report.views import ModeView, list_modes, list_sections
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import DraftInfo, GainMetric, Mode, Report, Section

MODE_COLUMNS = ["tau", "delivered", "speed-up", "tokens/s", "lossless"]
# With them the terminal's table of one draft fits into 80 characters, unless verdicts are long;
# the verdict above it says how many tokens are delivered.
OVERVIEW_COLUMNS = ["tau", "speed-up", "lossless"]
SIDE_BY_SIDE_COLUMNS = [
    *("draft", "method", "M params", "MB", "draft ms", "verify ms"),
    *("chain tau", "tree tau", "speed-up", "lossless"),
]
MISMATCH_COLUMNS = ["mismatched", "near-tie gap", "explained gap", "beyond gap", "widest divergence"]
INTERVALS_NOTE = "Brackets: 95 % interval over prompts; parentheses: their number."


def side_by_side_table(report: Report) -> Table:
    """Build a table of costs and speed-ups with a row for each draft and each mode without one."""
    modes = report.overall.modes
    plain, ngram = modes[AUTOREGRESSIVE], modes["ngram"]
    step = plain.split_ms and plain.split_ms.plain_step
    rows = [
        ["autoregressive", *[ABSENT] * 4, format_number(step), *_tau_cells(plain, None)],
        ["n-gram lookup", "ngram", "0", ABSENT, *_cost_cells(ngram), *_tau_cells(ngram, None)],
    ]
    for draft in report.drafts:
        chain, tree = (modes[f"{draft.name}/{name}"] for name in ("chain", "tree"))
        memory = draft.memory_bytes
        row = [
            draft.name,
            draft.method,
            format_millions(draft.parameters),
            format_millions(memory.weights + memory.state),
            *_cost_cells(tree),
            *_tau_cells(chain, tree, draft),
        ]
        rows.append(row)
    return Table(
        title="Drafts side by side",
        note=append_remarks(
            f"{format_definitions('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are "
            "the tree's (of lookup: the chain's). Brackets: 95 % interval over prompts.",
            report,
        ),
        columns=SIDE_BY_SIDE_COLUMNS,
        rows=rows,
        label_columns=2,
        stacked_headers=True,
    )


def summary_table(report: Report) -> Table:
    """Build a table with a row for each mode of each category and of all prompts."""
    return Table(
        title="Modes by category",
        note=append_remarks(f"{format_definitions(*MODE_COLUMNS[:4])} {INTERVALS_NOTE}", report),
        columns=["prompts", "mode", *MODE_COLUMNS],
        rows=[
            row
            for name, section in list_sections(report).items()
            for row in _mode_rows(name, section, list_modes(report, section), MODE_COLUMNS)
        ],
        label_columns=2,
    )


def overview_table(report: Report) -> Table:
    """Build a table with all modes on all prompts, then the tree in each category."""
    rows = []
    for name, section in list_sections(report).items():
        views = list_modes(report, section)
        shown = views if name == "all" else [view for view in views if view.name == "tree"]
        rows += _mode_rows(name, section, shown, OVERVIEW_COLUMNS)
    return Table(
        title="Modes",
        note=append_remarks(INTERVALS_NOTE, report),
        columns=["prompts", "mode", *OVERVIEW_COLUMNS],
        rows=rows,
        label_columns=2,
        footnotes=explain_undecided(report),
    )


def gain_table(report: Report) -> Table:
    """Build a table of the gains of each draft's modes over others."""
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=[
            [
                name,
                f"{view.label} over {other}",
                *(format_estimate(gain[metric], signed=True) for metric in get_args(GainMetric)),
            ]
            for name, section in list_sections(report).items()
            for view in list_modes(report, section)
            for other, gain in view.mode.gains.items()
        ],
        label_columns=2,
    )


def exactness_table(report: Report) -> Table:
    """Build a table of the comparison with the answers of autoregressive decoding."""
    return Table(
        title="Losslessness",
        note=append_remarks(
            "Answers compared with autoregressive decoding, token for token; in fp32 all must "
            f"match. {format_definitions('lossless')}",
            report,
        ),
        columns=["mode", "lossless", *MISMATCH_COLUMNS],
        rows=[
            [view.label, format_lossless(view.mode.verdict, view.draft), *_mismatch_cells(view.mode)]
            for view in list_modes(report)
        ],
        stacked_headers=True,
        footnotes=explain_undecided(report),
    )


def _mode_rows(name: str, section: Section, views: Iterable[ModeView], columns: list[str]) -> list[list[str]]:
    """Return a row for each mode on the prompts of a section."""
    count = section.modes[AUTOREGRESSIVE].figures.prompts
    cells = [(view.label, _mode_cells(view)) for view in views]
    return [[f"{name} ({count})", label, *map(row.__getitem__, columns)] for label, row in cells]


def _mode_cells(view: ModeView) -> dict[str, str]:
    figures = view.mode.figures
    return {
        "tau": format_estimate(figures.acceptance_length),
        "delivered": format_mean(figures.delivered_per_round),
        "speed-up": format_estimate(figures.speedup),
        "tokens/s": format_mean(figures.tokens_per_s, decimals=1),
        "lossless": format_lossless(view.mode.verdict, view.draft),
    }


def _mismatch_cells(mode: Mode) -> list[str]:
    verdict = mode.verdict
    if not is_compared(verdict):
        return [ABSENT] * len(MISMATCH_COLUMNS)
    widest = max(verdict.divergences, key=lambda divergence: divergence.logit_gap, default=None)
    return [
        f"{verdict.mismatched_prompts} of {mode.figures.prompts}",
        f"{verdict.near_tie_gap:.3g}",
        f"{verdict.explained_gap:.3g}",
        str(verdict.divergences_beyond_gap),
        f"{widest.logit_gap:.3g} at {widest.prompt_id}:{widest.position}" if widest else ABSENT,
    ]


def _cost_cells(mode: Mode) -> list[str]:
    """Format milliseconds per round of the draft and of the verification."""
    split = mode.split_ms
    return [format_number(split.draft), format_number(split.verification)] if split else [ABSENT] * 2


def _tau_cells(chain: Mode, tree: Mode | None, draft: DraftInfo | None = None) -> list[str]:
    """Format tau of chain and tree, and speed-up and losslessness of the tree (or the chain)."""
    main_mode = tree or chain
    return [
        format_mean(chain.figures.acceptance_length),
        format_mean(tree and tree.figures.acceptance_length),
        format_estimate(main_mode.figures.speedup),
        format_lossless(main_mode.verdict, draft),
    ]
