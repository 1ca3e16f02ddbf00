"""A few answers on the page, each token marked as drafted or as the target's own.

Nothing depends on color alone: accepted draft tokens are underlined, the prompt is in italics.
"""

from html import escape
from typing import Any

from infer.report.views import ReportDict, has_several_drafts

MAX_PROMPT_CHARS = 400  # the last characters of a prompt that are shown
KIND_LEGEND = {
    "prompt": "the prompt",
    "accepted": "written by the draft, accepted",
    "target": "the target's own: what the draft proposed was rejected, or its proposal ended",
}
ANSWER_STYLE = """
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


def render_samples(report: ReportDict) -> str:
    """Render a section with each draft's samples, the first draft's open; empty without samples."""
    samples = report.get("samples", [])
    if not samples:
        return ""
    legend = "; ".join(_mark_text(text, kind) for kind, text in KIND_LEGEND.items())
    drafts = dict.fromkeys(sample["draft"] for sample in samples)
    parts = [
        _render_draft(
            f"{name} tree" if has_several_drafts(report) else "tree",
            [sample for sample in samples if sample["draft"] == name],
            is_open=index == 0,
        )
        for index, name in enumerate(drafts)
    ]
    return f'<h2>Sample answers</h2><p class="note">{legend}.</p>' + "".join(parts)


def _render_draft(label: str, samples: list[dict[str, Any]], *, is_open: bool) -> str:
    texts = "".join(
        f'<p class="note">{escape(sample["prompt_id"])}</p><p class="answer">'
        f"{''.join(_mark_text(_shorten_prompt(part), part['kind']) for part in sample['pieces'])}"
        "</p>"
        for sample in samples
    )
    attribute = " open" if is_open else ""
    return f"<details{attribute}><summary>{escape(label)}</summary>{texts}</details>\n"


def _mark_text(text: str, kind: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'


def _shorten_prompt(piece: dict[str, Any]) -> str:
    text = piece["text"]
    if piece["kind"] == "prompt" and len(text) > MAX_PROMPT_CHARS:
        return f"... {text[-MAX_PROMPT_CHARS:]}"
    return text
