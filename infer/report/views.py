"""A view of a report's modes: their labels, keys and colors, and which of them matter most."""

from dataclasses import dataclass
from itertools import cycle

from data.sources.prompt_formats import NO_CATEGORY
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import DraftInfo, Mode, Report, Section

INK = "#010203"  # a placeholder, replaced by the page's text color
GRAY = "#999999"
# Middle tones that stand out on white and on black and for color-blind readers (Okabe and Ito).
MODE_COLORS = [GRAY, "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#b8a500"]
DRAFT_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#b8a500"]


@dataclass(frozen=True, kw_only=True)
class ModeView:
    """A mode of a report, with its label in tables and plots, and the draft that it belongs to."""

    label: str
    key: str
    mode: Mode
    draft: DraftInfo | None

    @property
    def name(self) -> str:
        """Return the mode's name without its draft's."""
        return self.key.rpartition("/")[2]


def list_sections(report: Report) -> dict[str, Section]:
    """Return all prompts together, then the categories by name, if there are several.

    Prompts without a category of their own, beside others that have one, are called `other`, if no category is.
    """
    categories = report.categories if len(report.categories) > 1 else {}
    unnamed = "other" if "other" not in categories else "without category"
    return {"all": report.overall} | {
        unnamed if name == NO_CATEGORY else name: section for name, section in categories.items()
    }


def has_several_drafts(report: Report) -> bool:
    return len(report.drafts) > 1


def list_modes(report: Report, section: Section | None = None, *, main: bool = False) -> list[ModeView]:
    """Return the modes of the target, then of each draft; of several drafts, `main` keeps trees."""
    drafts = {draft.name: draft for draft in report.drafts}
    views = []
    for key, mode in (section or report.overall).modes.items():
        draft_name, _, name = key.rpartition("/")
        label = name
        if draft_name and has_several_drafts(report):
            label = f"{draft_name} {name}"
        elif draft_name and name == AUTOREGRESSIVE:
            label = "adapted autoregressive"
        views.append(ModeView(label=label, key=key, mode=mode, draft=drafts.get(draft_name)))
    if main and has_several_drafts(report):
        return [view for view in views if view.draft is None or view.name == "tree"]
    return views


def get_draft_modes(report: Report, draft: DraftInfo) -> dict[str, Mode]:
    """Return the modes of a draft by name."""
    return {view.name: view.mode for view in list_modes(report) if view.draft is draft}


def find_baseline(report: Report, draft: DraftInfo | None) -> Mode:
    """Return autoregressive decoding of the target that verifies a draft, or of the report's."""
    modes = report.overall.modes
    own = f"{draft.name}/{AUTOREGRESSIVE}" if draft else AUTOREGRESSIVE
    return modes.get(own, modes[AUTOREGRESSIVE])


def assign_draft_colors(report: Report) -> list[tuple[str, DraftInfo]]:
    """Return each draft with a color; colors repeat after the eighth."""
    return list(zip(cycle(DRAFT_COLORS), report.drafts, strict=False))


def list_colored_modes(report: Report) -> list[tuple[str, ModeView]]:
    """Return the modes that the plots show, each with its color.

    These are the modes without a trained draft, then all modes of a single draft, or the tree mode of each of several.
    """
    several = [GRAY, INK, *(color for color, _ in assign_draft_colors(report))]
    colors = several if has_several_drafts(report) else cycle(MODE_COLORS)
    return list(zip(colors, list_modes(report, main=True), strict=False))
