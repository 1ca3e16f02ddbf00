"""The table of acceptance length by prompt length, and the sentence that describes the prompts."""

from infer.measure.by_length import REPORTED_MODES
from infer.report.number_format import Table, format_estimate
from infer.report.views import ReportDict


def prompt_length_table(report: ReportDict) -> Table:
    """Build a table with a row for each bucket of prompt lengths and each draft."""
    by_length = report["by_prompt_length"]
    rows = [
        [
            f"up to {bucket['up_to']:,}", name, str(bucket["prompts"]),
            *(format_estimate(modes[mode]) for mode in REPORTED_MODES),
        ]
        for bucket in by_length["buckets"]
        for name, modes in bucket["drafts"].items()
    ]  # fmt: skip
    return Table(
        title="Tau by prompt length",
        note="Prompt lengths are in tokens of the target.",
        columns=["prompt tokens", "draft", "prompts", "chain tau", "tree tau"],
        rows=rows,
        label_columns=3,
        footnotes=[
            f"{name}: {_describe_longest_row(tokens)}"
            for name, tokens in by_length["longest_row"].items()
        ],
    )


def _describe_longest_row(longest_row: int | None) -> str:
    if longest_row is None:
        return "the longest row that it was trained on is not known."
    return f"trained on rows of at most {longest_row:,} tokens; it has seen no longer text."


def describe_prompts(report: ReportDict) -> str:
    """Describe how many prompts there were, their source and their format."""
    prompts = report["prompts"]
    count, rendered = prompts["count"], prompts["chat_template"]
    how = "through the chat template" if rendered else "as plain text"
    if 0 < rendered < count:
        how = f"{rendered} of them {how}"
    return (
        f"{count} held-out prompts in {len(prompts['by_category'])} categories "
        f"({prompts['source']}; {how})"
    )
