"""Report the acceptance length by prompt length, beside each draft's longest training row.

Drafts are rarely as good after more tokens than they were trained on, which a mean over all prompts
hides.
"""

from dataclasses import asdict
from typing import Any

from infer.measure.metrics import estimate_metric
from infer.measure.records import PromptResult
from infer.measure.results import DraftResult, ModeOutcome, ModeResult

MIN_LENGTH_BUCKET = 256  # upper bound of the first bucket in tokens; each next bound is twice that
REPORTED_MODES = ("chain", "tree")


def prompt_length_bucket(tokens: int) -> int:
    """Return the bucket of a prompt of so many tokens, named by its upper bound.

    >>> [prompt_length_bucket(tokens) for tokens in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(MIN_LENGTH_BUCKET, 1 << (tokens - 1).bit_length())


def summarize_lengths(results: list[PromptResult]) -> dict[str, int]:
    """Summarize the lengths of the prompts in tokens."""
    tokens = sorted(result.prompt_tokens for result in results)
    return {"shortest": tokens[0], "median": tokens[len(tokens) // 2], "longest": tokens[-1]}


def summarize_by_length(results: list[PromptResult], drafts: list[DraftResult]) -> dict[str, Any]:
    """Summarize each bucket that has prompts; `results` may be those of any mode."""
    counts: dict[int, int] = {}
    for result in results:
        bucket = prompt_length_bucket(result.prompt_tokens)
        counts[bucket] = counts.get(bucket, 0) + 1
    return {
        "longest_row": {draft.name: draft.longest_row for draft in drafts},
        "buckets": [
            {
                "up_to": bucket,
                "prompts": count,
                "drafts": {
                    draft.name: {
                        name: _estimate_tau(draft.modes[name], bucket) for name in REPORTED_MODES
                    }
                    for draft in drafts
                },
            }
            for bucket, count in sorted(counts.items())
        ],
    }


def _estimate_tau(mode: ModeOutcome, bucket: int) -> dict[str, Any] | None:
    if not isinstance(mode, ModeResult):
        return None
    results = [
        result
        for result in mode.prompt_results
        if prompt_length_bucket(result.prompt_tokens) == bucket
    ]
    estimate = estimate_metric("acceptance_length", results, results)
    return estimate and asdict(estimate)
