"""Build a report from the results of all modes."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

from data.eval_prompts.contamination import Contamination
from data.eval_prompts.prompts import EvalPrompt, describe_origin, fingerprint_prompts
from infer.measure.intervals import Estimate
from infer.measure.metrics import estimate_metric, inter_token_latency
from infer.measure.records import DraftResult, ModeResult, PromptResult
from infer.measure.report_schema import (
    EvalReport,
    EvalSetup,
    LengthBucket,
    LengthSection,
    PromptFigures,
    PromptRow,
    PromptSet,
    TrainedMode,
)
from infer.measure.sections import build_section

SECONDS_DECIMALS = 6  # decimal places of seconds in rounds.jsonl
MIN_LENGTH_BUCKET = 256  # upper bound of the first bucket in tokens; each next bound is twice that


def describe_prompts(
    prompts: list[EvalPrompt],
    path: str | None,
    *,
    max_new_tokens: int,
    contamination: dict[str, Contamination],
) -> PromptSet:
    """Return the description of a report's prompts, which come from `path`."""
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return PromptSet(
        count=len(prompts),
        questions=len({prompt.question for prompt in prompts}),
        sha256=fingerprint_prompts(prompts),
        source=describe_origin(prompts, path),
        chat_template=sum(prompt.chat_template for prompt in prompts),
        lengths={
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
        },
        max_new_tokens=max_new_tokens,
        by_category=dict(Counter(prompt.category for prompt in prompts)),
        contamination=contamination,
    )


def build_report(
    setup: EvalSetup,
    *,
    autoregressive: ModeResult,
    ngram: ModeResult,
    drafts: list[DraftResult],
    target_bytes: int | None,
) -> EvalReport:
    """Build the report; all modes must hold the prompts of the setup.

    `target_bytes` is the size of the target's weights.
    """
    modes = {"autoregressive": autoregressive, "ngram": ngram} | {
        f"{draft.name}/{name}": mode for draft in drafts for name, mode in draft.modes.items()
    }
    return EvalReport(
        **vars(setup),
        **vars(build_section(autoregressive, ngram, drafts, target_bytes)),
        categories={
            name: build_section(
                autoregressive.select_category(name),
                ngram.select_category(name),
                [draft.select_category(name) for draft in drafts],
                target_bytes,
            )
            for name in setup.prompts.by_category
        },
        batches=[batch for draft in drafts for batch in draft.batches],
        replay={draft.name: draft.replay_result for draft in drafts if draft.replay_result},
        samples=[sample for draft in drafts for sample in draft.samples],
        by_prompt_length=_describe_lengths(autoregressive.prompt_results, drafts),
        training={draft.name: draft.curve for draft in drafts if draft.curve},
        per_prompt=_list_prompt_rows(autoregressive.prompt_results, modes),
        rounds=list(_round_records(modes)),
    )


def prompt_length_bucket(tokens: int) -> int:
    """Return the upper bound of the bucket of a prompt of this many tokens.

    >>> [prompt_length_bucket(tokens) for tokens in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(MIN_LENGTH_BUCKET, 1 << (tokens - 1).bit_length())


def _describe_lengths(results: list[PromptResult], drafts: list[DraftResult]) -> LengthSection:
    """Describe each bucket that has prompts, beside each draft's longest training row.

    Drafts are rarely as good after more tokens than they were trained on, which a mean over all
    prompts hides.
    """
    counts = Counter(prompt_length_bucket(len(result.prompt.ids)) for result in results)
    return LengthSection(
        longest_row={draft.name: draft.longest_row for draft in drafts},
        buckets=[
            LengthBucket(
                up_to=bucket,
                prompts=count,
                drafts={
                    draft.name: {
                        name: _estimate_tau(draft.modes[name], bucket)
                        for name in get_args(TrainedMode)
                    }
                    for draft in drafts
                },
            )
            for bucket, count in sorted(counts.items())
        ],
    )


def _estimate_tau(mode: ModeResult, bucket: int) -> Estimate | None:
    results = [r for r in mode.prompt_results if prompt_length_bucket(len(r.prompt.ids)) == bucket]
    return estimate_metric("acceptance_length", results, results)


def _list_prompt_rows(results: list[PromptResult], modes: dict[str, ModeResult]) -> list[PromptRow]:
    figures: dict[str, dict[str, PromptFigures]] = {result.prompt.id: {} for result in results}
    for label, result in _iterate_results(modes):
        answer, itl = result.generation, inter_token_latency(result.generation)
        figures[result.prompt.id][label] = PromptFigures(
            tokens=len(answer.ids),
            rounds=answer.rounds,
            accepted=sum(answer.accepted),
            drafted=sum(answer.drafted),
            ttft_ms=1000 * answer.prefill_s,
            itl_ms=None if itl is None else 1000 * itl,
            e2e_ms=1000 * answer.e2e_s,
        )
    return [
        PromptRow(
            prompt_id=prompt.id,
            category=prompt.category,
            question=prompt.question,
            turn=prompt.turn,
            prompt_tokens=len(prompt.ids),
            modes=figures[prompt.id],
        )
        for prompt in (result.prompt for result in results)
    ]


def _round_records(modes: dict[str, ModeResult]) -> Iterator[dict[str, Any]]:
    """Yield all that was recorded, one record for each prompt and mode."""
    for label, result in _iterate_results(modes):
        prompt, answer = result.prompt, result.generation
        yield {
            "prompt_id": prompt.id,
            "category": prompt.category,
            "turn": prompt.turn,
            "mode": label,
            "ids": answer.ids,
            "accepted": answer.accepted,
            "drafted": answer.drafted,
            "round_s": [round(seconds, SECONDS_DECIMALS) for seconds in answer.round_s],
            "prefill_s": round(answer.prefill_s, SECONDS_DECIMALS),
        }


def _iterate_results(modes: dict[str, ModeResult]) -> Iterator[tuple[str, PromptResult]]:
    return ((label, result) for label, mode in modes.items() for result in mode.prompt_results)
