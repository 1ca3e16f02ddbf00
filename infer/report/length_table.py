"""Acceptance length by the length of the prompt, as a table; and the prompts in a sentence."""

from infer.measure.by_length import MODES
from infer.report.number_format import Table, estimate
from infer.report.views import Report


def by_length_table(report: Report) -> Table:
    """Make a row for each bucket and draft."""
    found = report["by_prompt_length"]
    rows = [
        [
            f"up to {bucket['up_to']:,}", name, str(bucket["prompts"]),
            *(estimate(modes[mode]) for mode in MODES),
        ]
        for bucket in found["buckets"]
        for name, modes in bucket["drafts"].items()
    ]  # fmt: skip
    return Table(
        title="Tau by prompt length",
        note="Tokens of the prompt, as the target read it.",
        columns=["prompt tokens", "draft", "prompts", "chain tau", "tree tau"],
        rows=rows,
        labels=3,
        below=[f"{name}: {_said(tokens)}" for name, tokens in found["longest_row"].items()],
    )


def _said(longest_row: int | None) -> str:
    if longest_row is None:
        return "the longest row that it learned from is not known."
    return f"learned from rows of at most {longest_row:,} tokens; no longer text is known to it."


def prompts_said(report: Report) -> str:
    """Say how many prompts there were, where they are from and how they were written."""
    prompts = report["prompts"]
    count, rendered = prompts["count"], prompts["chat_template"]
    how = "through the chat template" if rendered else "as plain text"
    if 0 < rendered < count:
        how = f"{rendered} of them {how}"
    return (
        f"{count} held-out prompts in {len(prompts['by_category'])} categories "
        f"({prompts['source']}; {how})"
    )
