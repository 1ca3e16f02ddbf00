"""Where a report keeps its modes, what they are called, and which of them matter most."""

from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]  # or one of its categories, which hold modes in the same places
Mode = dict[str, Any]


@dataclass(kw_only=True)
class Named:
    """A mode of a report, or why there is none."""

    label: str  # in tables and plots
    key: str  # in `per_prompt`
    mode: Mode | None
    reason: str
    main: bool  # shown where there is no room for all


def sections(report: Report) -> dict[str, Report]:
    """The categories by name, then all prompts together."""
    return {**report["categories"], "all": report}


def several(section: Report) -> bool:
    """Whether drafts are compared with each other."""
    return len(section["drafts"]) > 1


def modes_of(section: Report, *, main: bool = False) -> list[Named]:
    """The modes of the target, then those of each draft; if `main`, of several drafts the trees."""
    found = [
        Named(
            label=name,
            key=name,
            mode=section[name],
            reason=section["not_measured"].get(name, ""),
            main=True,
        )
        for name in ("autoregressive", "ngram")
    ]
    for draft in section["drafts"]:
        found += [
            Named(
                label=label_of(section, draft, name),
                key=f"{draft['name']}/{name}",
                mode=mode,
                reason=draft["not_measured"].get(name, ""),
                main=name == "tree" or not several(section),
            )
            for name, mode in draft["modes"].items()
        ]
    return [one for one in found if one.main or not main]


def label_of(section: Report, draft: dict[str, Any], name: str) -> str:
    """What a draft's mode is called among the others of the section."""
    if several(section):
        return f"{draft['name']} {name}"
    return "adapted autoregressive" if name == "autoregressive" else name
