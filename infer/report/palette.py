"""The colors of modes and drafts: the same in every plot, readable on light and dark pages."""

from itertools import cycle, islice

from infer.measure.report_schema import Section
from infer.report.views import ModeView, has_several_drafts, list_modes

INK = "#010203"  # a placeholder, replaced by the page's text color
PAPER = "#fdfcfb"  # a placeholder, replaced by the page's background color
GRAY = "#999999"
# Middle tones that stand out on white and on black and for color-blind readers (Okabe and Ito).
MODE_COLORS = [GRAY, "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#b8a500"]
DRAFT_COLORS = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#b8a500",
]  # fmt: skip


def assign_draft_colors(section: Section) -> list[str]:
    """Assign a color to each draft; they repeat after the eighth."""
    return list(islice(cycle(DRAFT_COLORS), len(section.drafts)))


def assign_mode_colors(section: Section) -> list[tuple[str, ModeView]]:
    """Pair each mode that the plots show with a color, (color, mode).

    The plots show the modes without a trained draft, then all modes of a single draft, or the tree
    mode of each of several. A mode that was not measured has a color too.
    """
    views = list_modes(section, main=True)
    colors = (
        [GRAY, INK, *assign_draft_colors(section)]
        if has_several_drafts(section)
        else cycle(MODE_COLORS)
    )
    return list(zip(colors, views, strict=False))
