"""Which colour a mode has: the same in every plot, readable on a light and on a dark page."""

from itertools import cycle, islice

from infer.report.views import Named, Report, modes_of, several

INK = "#010203"  # drawn in this colour, shown in the page's text colour
PAPER = "#fdfcfb"  # shown in the colour of the page itself
GREY = "#999999"
# Middle tones that stand out on white and on black, and for colour-blind readers (Okabe and Ito).
OF_MODES = [GREY, "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#b8a500"]
OF_DRAFTS = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#b8a500",
]  # fmt: skip


def of_drafts(section: Report) -> list[str]:
    """A colour for each draft; they repeat after the eighth."""
    return list(islice(cycle(OF_DRAFTS), len(section["drafts"])))


def coloured(section: Report) -> list[tuple[str, Named]]:
    """The modes that plots show, measured or not: of one draft all, of several the trees."""
    shown = modes_of(section, main=True)
    colours = [GREY, INK, *of_drafts(section)] if several(section) else cycle(OF_MODES)
    return list(zip(colours, shown, strict=False))
