"""A view of a report's modes: their labels, their keys, and which of them matter most."""

from dataclasses import dataclass
from typing import Any

ReportDict = dict[str, Any]  # or one of its categories, which holds modes under the same keys
ModeDict = dict[str, Any]


@dataclass(kw_only=True)
class ModeView:
    """A mode of a report, or the reason why it was not measured."""

    label: str  # in tables and plots
    key: str  # in `per_prompt`
    mode: ModeDict | None
    reason: str
    main: bool  # also shown where there is no room for all modes


def collect_sections(report: ReportDict) -> dict[str, ReportDict]:
    """Return the categories by name, then all prompts together."""
    return {**report["categories"], "all": report}


def has_several_drafts(section: ReportDict) -> bool:
    """Return whether the section compares several drafts."""
    return len(section["drafts"]) > 1


def list_modes(section: ReportDict, *, main: bool = False) -> list[ModeView]:
    """List the modes of the target, then of each draft; `main` reduces several drafts to trees."""
    views = [
        ModeView(
            label=name,
            key=name,
            mode=section[name],
            reason=section["not_measured"].get(name, ""),
            main=True,
        )
        for name in ("autoregressive", "ngram")
    ]
    for draft in section["drafts"]:
        views += [
            ModeView(
                label=mode_label(section, draft, name),
                key=f"{draft['name']}/{name}",
                mode=mode,
                reason=draft["not_measured"].get(name, ""),
                main=name == "tree" or not has_several_drafts(section),
            )
            for name, mode in draft["modes"].items()
        ]
    return [view for view in views if view.main or not main]


def mode_label(section: ReportDict, draft: dict[str, Any], name: str) -> str:
    """Return the label of a draft's mode; it names the draft where there are several."""
    if has_several_drafts(section):
        return f"{draft['name']} {name}"
    return "adapted autoregressive" if name == "autoregressive" else name
