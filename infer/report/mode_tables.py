"""What each mode accepted, gained and answered, as tables."""

from infer.report.definitions import POSITION, definition, sentences
from infer.report.number_format import ABSENT, Table, compared, estimate, lossless, number
from infer.report.prose import explain_undecided, remarked
from infer.report.views import Mode, Report, label_of, modes_of

# What fits beside the labels at 100 columns; report.json holds every position.
POSITIONS_SHOWN = 10


def measured_of(report: Report, *, main: bool = False) -> list[tuple[str, Mode]]:
    """The modes that were measured, by what they are called."""
    return [(one.label, one.mode) for one in modes_of(report, main=main) if one.mode]


def summary_table(groups: dict[str, Report], *, main: bool = False) -> Table:
    rows = [
        [
            f"{name} ({section['autoregressive']['prompts']})",
            one.label,
            *(_mode_cells(one.mode) if one.mode else [ABSENT] * 5),
        ]
        for name, section in groups.items()
        for one in modes_of(section, main=main)
    ]
    return Table(
        title="Modes by category",
        note=remarked(
            f"{sentences('tau', 'delivered', 'speed-up', 'tokens/s')} Brackets: 95 % interval over "
            "prompts; parentheses: their number.",
            groups["all"],
        ),
        columns=["prompts", "mode", "tau", "delivered", "speed-up", "tokens/s", "lossless"],
        rows=rows,
        labels=2,
    )


def gain_table(groups: dict[str, Report], *, main: bool = False) -> Table:
    rows = [
        [
            name,
            f"{label_of(section, draft, mode)} {other.replace('_', ' ')}",
            *(
                estimate(gain and gain[figure], signed=True)
                for figure in ("acceptance_length", "acceptance_rate", "speedup")
            ),
        ]
        for name, section in groups.items()
        for draft in section["drafts"]
        for mode, gains in draft["gain"].items()
        if mode == "tree" or not main
        for other, gain in gains.items()
    ]
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=rows,
        labels=2,
    )


def acceptance_table(report: Report, *, main: bool = False) -> Table:
    """Of modes that propose something."""
    figures = (
        "acceptance_length", "delivered_per_round", "acceptance_length_per_prompt",
        "acceptance_rate",
    )  # fmt: skip
    return Table(
        title="Acceptance",
        note=sentences("delivered", "tau per prompt", "acceptance rate"),
        columns=["mode", "tau", "delivered", "tau per prompt", "acceptance rate"],
        rows=[
            [label, *(estimate(mode[figure]) for figure in figures)]
            for label, mode in measured_of(report, main=main)
            if mode["depth"]
        ],
    )


def position_table(report: Report) -> Table:
    shown = [(label, mode) for label, mode in measured_of(report) if mode["depth"]]
    depth = min(POSITIONS_SHOWN, max((mode["depth"] for _, mode in shown), default=0))
    rows = [
        [label, kind, *_cells(mode["acceptance_by_position"][kind], depth)]
        for label, mode in shown
        for kind in ("marginal", "conditional")
    ]
    return Table(
        title="Acceptance by position",
        note=f"{definition(POSITION)}.",
        columns=["mode", "share", *(str(position + 1) for position in range(depth))],
        rows=rows,
        labels=2,
    )


def exactness_table(report: Report, *, main: bool = False) -> Table:
    """If `main`, of several drafts the trees and whatever answered otherwise."""
    shown = {label for label, _ in measured_of(report, main=True)}
    rows = [
        [label, lossless(mode), *(_divergences(mode) if compared(mode) else [ABSENT] * 5)]
        for label, mode in measured_of(report)
        if not main or label in shown or mode["mismatched_prompts"]
    ]
    return Table(
        title="Losslessness",
        note=remarked(
            "Answers compared with autoregressive decoding, token for token; in fp32 none may "
            f"differ. {sentences('lossless')}",
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
        stacked=True,
        below=explain_undecided(report),
    )


def _mode_cells(mode: Mode) -> list[str]:
    return [
        estimate(mode["acceptance_length"]),
        number(mode["delivered_per_round"] and mode["delivered_per_round"]["mean"]),
        estimate(mode["speedup"]),
        f"{mode['tokens_per_s']['mean']:.1f}" if mode["tokens_per_s"] else ABSENT,
        lossless(mode),
    ]


def _cells(values: list[float | None], width: int) -> list[str]:
    return [number(value) for value in values[:width]] + [""] * (width - len(values))


def _divergences(mode: Mode) -> list[str]:
    return [
        f"{mode['mismatched_prompts']} of {mode['prompts']}",
        f"{mode['near_tie_gap']:.3g}",
        f"{mode['explained_gap']:.3g}",
        str(mode["divergences_beyond_gap"]),
        _widest(mode),
    ]


def _widest(mode: Mode) -> str:
    if not mode["divergences"]:
        return ABSENT
    widest = max(mode["divergences"], key=lambda divergence: divergence["logit_gap"])
    return f"{widest['logit_gap']:.3g} at {widest['prompt_id']}:{widest['position']}"
