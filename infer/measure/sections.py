"""Build one section of a report: every mode on one set of prompts."""

from typing import Any, get_args

from infer.measure.metrics import (
    EVAL_METRICS,
    acceptance_by_position,
    estimate_gain,
    estimate_metric,
    has_tree_rounds,
    inter_token_latency,
    is_looping,
    memory_bound_speedup,
    percentiles_in_ms,
)
from infer.measure.records import DraftResult, ModeResult
from infer.measure.report_schema import (
    AdaptedTargetInfo,
    DraftSection,
    Gain,
    GainMetric,
    ModeSection,
    Section,
    TrainedMode,
)

DRAFT_MODES = ("autoregressive", "untrained", "chain", "tree", "tuned")


def build_section(
    autoregressive: ModeResult,
    ngram: ModeResult,
    drafts: list[DraftResult],
    target_bytes: int | None,
) -> Section:
    """Describe all modes on one set of prompts."""
    answers = [result.generation.ids for result in autoregressive.prompt_results]
    return Section(
        loop_share=sum(map(is_looping, answers)) / len(answers),
        autoregressive=_describe_mode(autoregressive, autoregressive),
        ngram=_describe_mode(ngram, autoregressive, bytes_ratio=0.0),
        not_measured={},
        drafts=[_describe_draft(draft, autoregressive, ngram, target_bytes) for draft in drafts],
    )


def _describe_draft(
    draft: DraftResult, autoregressive: ModeResult, ngram: ModeResult, target_bytes: int | None
) -> DraftSection:
    """Describe a draft, compared with its adapted target if it has one."""
    adapted, modes = draft.target, draft.modes
    baseline = modes.get("autoregressive", autoregressive)
    verifier_bytes = adapted.weight_bytes if adapted else target_bytes
    ratio = draft.memory.weights / verifier_bytes if verifier_bytes else None
    return DraftSection(
        name=draft.name,
        method=draft.method,
        parameters=draft.num_parameters,
        memory_bytes=draft.memory,
        target=adapted
        and AdaptedTargetInfo(
            name=adapted.name,
            parameters=adapted.parameters,
            adapted_from=adapted.adapted_from,
            changed_answers=_count_changed_answers(baseline, autoregressive),
        ),
        modes={
            name: _describe_mode(modes[name], baseline, bytes_ratio=ratio)
            if name in modes
            else None
            for name in DRAFT_MODES
            if name in modes or name in draft.not_measured
        },
        tuned_tree=draft.tuned_tree,
        not_measured=draft.not_measured,
        gain={
            name: {
                "over_untrained": _describe_gain(
                    modes[name], modes.get("untrained"), (baseline, baseline)
                ),
                "over_ngram": _describe_gain(modes[name], ngram, (baseline, autoregressive)),
            }
            for name in get_args(TrainedMode)
        },
    )


def _count_changed_answers(mode: ModeResult, original: ModeResult) -> int:
    """Count the prompts that a mode answers differently from the original."""
    answers = {result.prompt.id: result.generation.ids for result in original.prompt_results}
    return sum(r.generation.ids != answers[r.prompt.id] for r in mode.prompt_results)


def _describe_mode(
    mode: ModeResult, autoregressive: ModeResult, *, bytes_ratio: float | None = None
) -> ModeSection:
    """Describe a mode; `bytes_ratio` is the bytes of the draft's weights over the target's."""
    results = mode.prompt_results
    answers = [result.generation for result in results]
    metrics: dict[str, Any] = {
        name: estimate_metric(name, results, autoregressive.prompt_results) for name in EVAL_METRICS
    }
    tau, speedup, passes = metrics["acceptance_length"], metrics["speedup"], mode.draft_passes
    costs = mode.costs if speedup else None
    predicted = costs and costs.predicted_speedup(tau.mean)
    return ModeSection(
        prompts=len(results),
        questions=len({result.prompt.question for result in results}),
        batch=1,
        depth=max(result.depth for result in results),
        nodes=max(max(answer.drafted, default=0) for answer in answers),
        drafts_trees=has_tree_rounds(results),
        **metrics,
        draft_passes=passes,
        mbsu=memory_bound_speedup(tau, draft_passes=passes, bytes_ratio=bytes_ratio)
        if tau and passes is not None and bytes_ratio is not None
        else None,
        acceptance_by_position=acceptance_by_position(results),
        ttft_ms=percentiles_in_ms([answer.prefill_s for answer in answers]),
        itl_ms=percentiles_in_ms(list(map(inter_token_latency, answers))),
        e2e_ms=percentiles_in_ms([answer.e2e_s for answer in answers]),
        **vars(mode.exactness.judge(mode.verification)),
        efficiency=predicted and speedup.mean / predicted,
        predicted_speedup=predicted,
        costs_ms=costs,
        split_ms=mode.split,
        bottleneck=mode.bottleneck,
        graphs_after_warmup=mode.graphs_after_warmup,
    )


def _describe_gain(
    mode: ModeResult, other: ModeResult | None, baselines: tuple[ModeResult, ModeResult]
) -> Gain | None:
    """Describe the gains of `mode` over `other`.

    `baselines` are the autoregressive modes of the targets of the two.
    """
    if other is None:
        return None
    compared = [result.prompt_results for result in (mode, other, *baselines)]
    return {name: estimate_gain(name, *compared) for name in get_args(GainMetric)}
