"""Tables of the modes: acceptance, speed-up, gains and losslessness."""

from infer.report.definitions import POSITION_COLUMN, format_definitions, get_definition
from infer.report.number_format import (
    ABSENT,
    Table,
    format_estimate,
    format_lossless,
    format_number,
    is_compared,
)
from infer.report.prose import append_remarks, explain_undecided
from infer.report.views import ModeDict, ReportDict, list_modes, mode_label

# More columns do not fit into 100 characters; report.json holds every position.
MAX_POSITIONS = 10


def list_measured_modes(report: ReportDict, *, main: bool = False) -> list[tuple[str, ModeDict]]:
    """List the modes that were measured, with their labels."""
    return [(view.label, view.mode) for view in list_modes(report, main=main) if view.mode]


def summary_table(sections: dict[str, ReportDict], *, main: bool = False) -> Table:
    """Build a table with a row for each mode of each section."""
    rows = [
        [
            f"{name} ({section['autoregressive']['prompts']})",
            view.label,
            *(_mode_cells(view.mode) if view.mode else [ABSENT] * 5),
        ]
        for name, section in sections.items()
        for view in list_modes(section, main=main)
    ]
    return Table(
        title="Modes by category",
        note=append_remarks(
            f"{format_definitions('tau', 'delivered', 'speed-up', 'tokens/s')} Brackets: 95 % "
            "interval over prompts; parentheses: their number.",
            sections["all"],
        ),
        columns=["prompts", "mode", "tau", "delivered", "speed-up", "tokens/s", "lossless"],
        rows=rows,
        label_columns=2,
    )


def gain_table(sections: dict[str, ReportDict], *, main: bool = False) -> Table:
    """Build a table of the gains of each draft's modes over others."""
    rows = [
        [
            name,
            f"{mode_label(section, draft, mode)} {baseline.replace('_', ' ')}",
            *(
                format_estimate(gain and gain[metric], signed=True)
                for metric in ("acceptance_length", "acceptance_rate", "speedup")
            ),
        ]
        for name, section in sections.items()
        for draft in section["drafts"]
        for mode, gains in draft["gain"].items()
        if mode == "tree" or not main
        for baseline, gain in gains.items()
    ]
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=rows,
        label_columns=2,
    )


def acceptance_table(report: ReportDict, *, main: bool = False) -> Table:
    """Build a table of acceptance figures, with the modes that propose something."""
    metrics = (
        "acceptance_length", "delivered_per_round", "acceptance_length_per_prompt",
        "acceptance_rate",
    )  # fmt: skip
    return Table(
        title="Acceptance",
        note=format_definitions("delivered", "tau per prompt", "acceptance rate"),
        columns=["mode", "tau", "delivered", "tau per prompt", "acceptance rate"],
        rows=[
            [label, *(format_estimate(mode[metric]) for metric in metrics)]
            for label, mode in list_measured_modes(report, main=main)
            if mode["depth"]
        ],
    )


def position_table(report: ReportDict) -> Table:
    """Build a table of marginal and conditional acceptance at each draft position."""
    modes = [(label, mode) for label, mode in list_measured_modes(report) if mode["depth"]]
    depth = min(MAX_POSITIONS, max((mode["depth"] for _, mode in modes), default=0))
    rows = [
        [label, kind, *_number_cells(mode["acceptance_by_position"][kind], depth)]
        for label, mode in modes
        for kind in ("marginal", "conditional")
    ]
    return Table(
        title="Acceptance by position",
        note=f"{get_definition(POSITION_COLUMN)}.",
        columns=["mode", "share", *(str(position + 1) for position in range(depth))],
        rows=rows,
        label_columns=2,
    )


def exactness_table(report: ReportDict, *, main: bool = False) -> Table:
    """Build a table of the comparison with the answers of autoregressive decoding.

    With `main` and several drafts, it has only trees and modes whose answers differ.
    """
    main_labels = {label for label, _ in list_measured_modes(report, main=True)}
    rows = [
        [
            label,
            format_lossless(mode),
            *(_mismatch_cells(mode) if is_compared(mode) else [ABSENT] * 5),
        ]
        for label, mode in list_measured_modes(report)
        if not main or label in main_labels or mode["mismatched_prompts"]
    ]
    return Table(
        title="Losslessness",
        note=append_remarks(
            "Answers compared with autoregressive decoding, token for token; in fp32 none may "
            f"differ. {format_definitions('lossless')}",
            report,
        ),
        columns=[
            "mode",
            "lossless",
            "mismatched",
            "near-tie gap",
            "explained",
            "beyond it",
            "widest divergence",
        ],
        rows=rows,
        stacked_headers=True,
        footnotes=explain_undecided(report),
    )


def _mode_cells(mode: ModeDict) -> list[str]:
    return [
        format_estimate(mode["acceptance_length"]),
        format_number(mode["delivered_per_round"] and mode["delivered_per_round"]["mean"]),
        format_estimate(mode["speedup"]),
        f"{mode['tokens_per_s']['mean']:.1f}" if mode["tokens_per_s"] else ABSENT,
        format_lossless(mode),
    ]


def _number_cells(values: list[float | None], width: int) -> list[str]:
    return [format_number(value) for value in values[:width]] + [""] * (width - len(values))


def _mismatch_cells(mode: ModeDict) -> list[str]:
    return [
        f"{mode['mismatched_prompts']} of {mode['prompts']}",
        f"{mode['near_tie_gap']:.3g}",
        f"{mode['explained_gap']:.3g}",
        str(mode["divergences_beyond_gap"]),
        _widest_mismatch(mode),
    ]


def _widest_mismatch(mode: ModeDict) -> str:
    if not mode["divergences"]:
        return ABSENT
    widest = max(mode["divergences"], key=lambda divergence: divergence["logit_gap"])
    return f"{widest['logit_gap']:.3g} at {widest['prompt_id']}:{widest['position']}"
