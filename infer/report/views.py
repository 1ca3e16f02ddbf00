"""A view of a report's modes: their labels, keys and colors, and which of them matter most."""

from dataclasses import dataclass
from itertools import cycle, islice

from data.sources.prompt_formats import NO_CATEGORY
from infer.measure.report_schema import DraftSection, ModeSection, Report, Section

INK = "#010203"  # a placeholder, replaced by the page's text color
PAPER = "#fdfcfb"  # a placeholder, replaced by the page's background color
GRAY = "#999999"
# Middle tones that stand out on white and on black and for color-blind readers (Okabe and Ito).
MODE_COLORS = [GRAY, "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#b8a500"]
DRAFT_COLORS = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#b8a500",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModeView:
    """A mode of a report, or the reason why it was not measured."""

    label: str  # in tables and plots
    key: str  # in `per_prompt`
    mode: ModeSection | None
    reason: str = ""
    main: bool = True  # also shown where there is no room for all modes


def collect_sections(report: Report) -> dict[str, Section]:
    """Return all prompts together, then the categories by name."""
    return {"all": report, **list_categories(report)}


def list_categories(report: Report) -> dict[str, Section]:
    """Return the categories by name, or none if a single one has all prompts.

    Prompts without a category of their own, beside others that have one, are called `other`.
    """
    if len(report.categories) < 2:
        return {}
    return {
        "other" if name == NO_CATEGORY else name: section
        for name, section in report.categories.items()
    }


def has_several_drafts(section: Section) -> bool:
    """Return whether the section compares several drafts."""
    return len(section.drafts) > 1


def list_modes(section: Section, *, main: bool = False) -> list[ModeView]:
    """Return the modes of the target, then of each draft; of several drafts, `main` keeps trees."""
    views = [
        ModeView(label=name, key=name, mode=mode, reason=section.not_measured.get(name, ""))
        for name, mode in (("autoregressive", section.autoregressive), ("ngram", section.ngram))
    ] + [
        ModeView(
            label=mode_label(section, draft, name),
            key=f"{draft.name}/{name}",
            mode=mode,
            reason=draft.not_measured.get(name, ""),
            main=name == "tree" or not has_several_drafts(section),
        )
        for draft in section.drafts
        for name, mode in draft.modes.items()
    ]
    return [view for view in views if view.main or not main]


def list_measured_modes(section: Section, *, main: bool = False) -> list[tuple[str, ModeSection]]:
    """Return the modes that were measured, with their labels."""
    return [(view.label, view.mode) for view in list_modes(section, main=main) if view.mode]


def mode_label(section: Section, draft: DraftSection, name: str) -> str:
    """Return the label of a draft's mode; it names the draft if there are several."""
    if has_several_drafts(section):
        return f"{draft.name} {name}"
    return "adapted autoregressive" if name == "autoregressive" else name


def assign_draft_colors(section: Section) -> list[str]:
    """Return a color for each draft; colors repeat after the eighth."""
    return list(islice(cycle(DRAFT_COLORS), len(section.drafts)))


def list_colored_modes(section: Section) -> list[tuple[str, ModeView, ModeSection]]:
    """Return the measured modes that the plots show, each with its color and its view.

    The plots show the modes without a trained draft, then all modes of a single draft, or the tree
    mode of each of several. A mode that was not measured takes a color too.
    """
    several = has_several_drafts(section)
    colors = [GRAY, INK, *assign_draft_colors(section)] if several else cycle(MODE_COLORS)
    return [
        (color, view, view.mode)
        for color, view in zip(colors, list_modes(section, main=True), strict=False)
        if view.mode
    ]
