"""Acceptance length by the length of the prompt, beside the longest row that a draft learned from.

A draft is rarely as good behind more tokens than it ever saw: a mean over all prompts hides it.
"""

from dataclasses import asdict
from typing import Any

from infer.measure.metrics import estimate
from infer.measure.records import Trace
from infer.measure.results import DraftRun, Measured, Mode

SHORTEST = 256  # tokens that the first bucket reaches to; each other one to twice as many
MODES = ("chain", "tree")


def up_to(tokens: int) -> int:
    """The bucket of a prompt: the most tokens that its prompts have.

    >>> [up_to(tokens) for tokens in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


def lengths(traces: list[Trace]) -> dict[str, int]:
    """Measure the lengths of the prompts in tokens."""
    tokens = sorted(trace.prompt_tokens for trace in traces)
    return {"shortest": tokens[0], "median": tokens[len(tokens) // 2], "longest": tokens[-1]}


def by_prompt_length(traces: list[Trace], drafts: list[DraftRun]) -> dict[str, Any]:
    """Each bucket that has prompts; `traces` are those of any mode, for their prompts."""
    counts: dict[int, int] = {}
    for trace in traces:
        bucket = up_to(trace.prompt_tokens)
        counts[bucket] = counts.get(bucket, 0) + 1
    return {
        "longest_row": {draft.name: draft.longest_row for draft in drafts},
        "buckets": [
            {
                "up_to": bucket,
                "prompts": count,
                "drafts": {
                    draft.name: {name: _tau(draft.modes[name], bucket) for name in MODES}
                    for draft in drafts
                },
            }
            for bucket, count in sorted(counts.items())
        ],
    }


def _tau(mode: Mode, bucket: int) -> dict[str, Any] | None:
    if not isinstance(mode, Measured):
        return None
    traces = [trace for trace in mode.traces if up_to(trace.prompt_tokens) == bucket]
    found = estimate("acceptance_length", traces, traces)
    return found and asdict(found)
