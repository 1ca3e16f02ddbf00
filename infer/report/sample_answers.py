"""A few answers on the page, each token marked by where it came from.

Colour alone says nothing: what the draft wrote is underlined, the prompt is in italics.
"""

from html import escape
from typing import Any

from infer.report.views import Report, several

MOST_OF_A_PROMPT = 400  # characters, its last ones
LEGEND = {
    "prompt": "the prompt",
    "accepted": "written by the draft, accepted",
    "target": "the target's own: what the draft proposed was rejected, or its proposal ended",
}
STYLE = """
.answer { white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.6 ui-monospace, monospace;
  border-left: 3px solid #8888; padding-left: .8rem; }
.prompt { font-style: italic; opacity: .65; }
.accepted { background: #0072b226; text-decoration: underline 2px #0072b2;
  text-underline-offset: .2em; text-decoration-skip-ink: none; }
.target { font-weight: 600; }
summary { cursor: pointer; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  .accepted { background: #56b4e940; text-decoration-color: #56b4e9; }
}
"""


def answers_shown(report: Report) -> str:
    """A section with the samples of each draft, the first draft's open; empty without samples."""
    samples = report.get("samples", [])
    if not samples:
        return ""
    legend = "; ".join(_marked(text, kind) for kind, text in LEGEND.items())
    drafts = dict.fromkeys(sample["draft"] for sample in samples)
    parts = [
        _of_draft(
            f"{name} tree" if several(report) else "tree",
            [sample for sample in samples if sample["draft"] == name],
            opened=place == 0,
        )
        for place, name in enumerate(drafts)
    ]
    return f'<h2>Sample answers</h2><p class="note">{legend}.</p>' + "".join(parts)


def _of_draft(label: str, samples: list[dict[str, Any]], *, opened: bool) -> str:
    texts = "".join(
        f'<p class="note">{escape(sample["prompt_id"])}</p><p class="answer">'
        f"{''.join(_marked(_short(piece), piece['kind']) for piece in sample['pieces'])}</p>"
        for sample in samples
    )
    attribute = " open" if opened else ""
    return f"<details{attribute}><summary>{escape(label)}</summary>{texts}</details>\n"


def _marked(text: str, kind: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'


def _short(piece: dict[str, Any]) -> str:
    text = piece["text"]
    if piece["kind"] == "prompt" and len(text) > MOST_OF_A_PROMPT:
        return f"... {text[-MOST_OF_A_PROMPT:]}"
    return text
