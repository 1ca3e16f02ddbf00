"""A view of a report's modes: their labels, their keys, and which of them matter most."""

from dataclasses import dataclass

from infer.measure.report_schema import DraftSection, ModeSection, Report, Section


@dataclass(frozen=True, kw_only=True)
class ModeView:
    """A mode of a report, or the reason why it was not measured."""

    label: str  # in tables and plots
    key: str  # in `per_prompt`
    mode: ModeSection | None
    reason: str = ""
    main: bool = True  # also shown where there is no room for all modes


def collect_sections(report: Report) -> dict[str, Section]:
    """Return the categories by name, then all prompts together."""
    return {**report.categories, "all": report}


def has_several_drafts(section: Section) -> bool:
    """Return whether the section compares several drafts."""
    return len(section.drafts) > 1


def list_modes(section: Section, *, main: bool = False) -> list[ModeView]:
    """List the modes of the target, then of each draft; `main` reduces several drafts to trees."""
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
    """List the modes that were measured, with their labels."""
    return [(view.label, view.mode) for view in list_modes(section, main=main) if view.mode]


def mode_label(section: Section, draft: DraftSection, name: str) -> str:
    """Return the label of a draft's mode; it names the draft where there are several."""
    if has_several_drafts(section):
        return f"{draft.name} {name}"
    return "adapted autoregressive" if name == "autoregressive" else name
