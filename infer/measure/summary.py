"""Build one section of a report as JSON holds it: every mode on one set of prompts."""

from dataclasses import asdict
from typing import Any

from infer.measure.intervals import Estimate
from infer.measure.metrics import (
    EVAL_METRICS,
    GAIN_METRICS,
    estimate_gain,
    estimate_metric,
    memory_bound_speedup,
)
from infer.measure.records import (
    RoundCosts,
    acceptance_by_position,
    has_tree_rounds,
    inter_token_latency,
    loop_share,
    percentiles_in_ms,
)
from infer.measure.results import (
    BatchResult,
    DraftResult,
    ModeOutcome,
    ModeResult,
    NotMeasured,
    RoundSplit,
    VerifiedResult,
)

TRAINED_MODES = ("chain", "tree")


def build_section(
    autoregressive: ModeResult,
    ngram: ModeOutcome,
    drafts: list[DraftResult],
    target_bytes: int | None,
) -> dict[str, Any]:
    """Describe all modes on one set of prompts."""
    return {
        "loop_share": loop_share(autoregressive.prompt_results),
        "autoregressive": _describe_mode(autoregressive, autoregressive),
        "ngram": _describe_mode(ngram, autoregressive, bytes_ratio=0.0),
        "not_measured": _list_reasons({"ngram": ngram}),
        "drafts": [_describe_draft(draft, autoregressive, ngram, target_bytes) for draft in drafts],
    }


def _describe_draft(
    draft: DraftResult, autoregressive: ModeResult, ngram: ModeOutcome, target_bytes: int | None
) -> dict[str, Any]:
    """Describe a draft, compared with its adapted target where it has one."""
    adapted = draft.target
    baseline = adapted.autoregressive if adapted else autoregressive
    verifier_bytes = adapted.weight_bytes if adapted else target_bytes
    ratio = draft.memory.weights / verifier_bytes if verifier_bytes else None
    return {
        "name": draft.name,
        "method": draft.method,
        "parameters": draft.num_parameters,
        "memory_bytes": asdict(draft.memory),
        "target": adapted
        and {
            "name": adapted.name,
            "parameters": adapted.num_parameters,
            "adapted_from": adapted.adapted_from,
            "changed_answers": adapted.count_changed_answers(autoregressive),
        },
        "modes": {
            name: _describe_mode(mode, baseline, bytes_ratio=ratio)
            for name, mode in draft.modes.items()
        },
        "not_measured": _list_reasons(draft.modes),
        "gain": {
            name: {
                "over_untrained": _describe_gain(
                    draft.modes[name], draft.untrained, (baseline, baseline)
                ),
                "over_ngram": _describe_gain(draft.modes[name], ngram, (baseline, autoregressive)),
            }
            for name in TRAINED_MODES
        },
    }


def _describe_mode(
    mode: ModeOutcome, autoregressive: ModeResult, *, bytes_ratio: float | None = None
) -> dict[str, Any] | None:
    """Describe a mode; `bytes_ratio` is the bytes of the draft's weights over the target's."""
    if isinstance(mode, NotMeasured):
        return None
    results = mode.prompt_results
    estimates = {
        name: estimate_metric(name, results, autoregressive.prompt_results) for name in EVAL_METRICS
    }
    metrics = {name: _asdict_or_none(estimate) for name, estimate in estimates.items()}
    return {
        "prompts": len(results),
        "questions": len({result.question for result in results}),
        "batch": mode.batch,
        "depth": max(result.depth for result in results),
        "nodes": max(max(result.drafted, default=0) for result in results),
        "drafts_trees": has_tree_rounds(results),
        **metrics,
        **_describe_mbsu(mode, estimates["acceptance_length"], bytes_ratio),
        "acceptance_by_position": asdict(acceptance_by_position(results)),
        "ttft_ms": _asdict_or_none(percentiles_in_ms([result.prefill_s for result in results])),
        "itl_ms": _asdict_or_none(
            percentiles_in_ms([inter_token_latency(result) for result in results])
        ),
        "e2e_ms": _asdict_or_none(percentiles_in_ms([result.e2e_s for result in results])),
        **describe_verdict(mode),
        **_describe_efficiency(mode, metrics),
        "split_ms": mode.split and _split_to_ms(mode.split),
        "bottleneck": mode.bottleneck,
        "graphs_after_warmup": mode.graphs_after_warmup,
    }


def describe_verdict(mode: VerifiedResult) -> dict[str, Any]:
    """Describe whether the answers are the target's own, and the evidence for it."""
    exactness = mode.exactness
    return {
        "verification": mode.verification,
        "lossy": mode.is_lossy,
        "lossless": mode.lossless,
        "mismatched_prompts": exactness.mismatched_prompts,
        "near_tie_gap": exactness.tolerance.near_tie_gap,
        "explained_gap": exactness.tolerance.explained_gap,
        "divergences_beyond_gap": exactness.mismatches_beyond_gap,
        "divergences": [asdict(mismatch) for mismatch in exactness.mismatches],
    }


def describe_batch(result: BatchResult) -> dict[str, Any]:
    """Describe a mode that decoded a batch of rows together."""
    metrics = ("speedup", "tokens_per_s", "autoregressive_tokens_per_s", "acceptance_length")
    return {
        "batch": result.batch,
        "mode": result.mode,
        **{name: asdict(getattr(result, name)) for name in metrics},
        **describe_verdict(result),
    }


def _describe_mbsu(mode: ModeResult, tau: Estimate | None, ratio: float | None) -> dict[str, Any]:
    passes = mode.draft_passes
    if tau is None or passes is None or ratio is None:
        return {"draft_passes": passes, "mbsu": None}
    mbsu = memory_bound_speedup(tau, draft_passes=passes, bytes_ratio=ratio)
    return {"draft_passes": passes, "mbsu": asdict(mbsu)}


def _describe_efficiency(mode: ModeResult, metrics: dict[str, Any]) -> dict[str, Any]:
    """Describe the measured speed-up over the predicted one, and the costs behind the latter."""
    costs, speedup = mode.costs, metrics["speedup"]
    if speedup is None:
        return {"efficiency": None, "predicted_speedup": None, "costs_ms": None}
    predicted = costs and costs.predicted_speedup(metrics["acceptance_length"]["mean"])
    return {
        "efficiency": predicted and speedup["mean"] / predicted,
        "predicted_speedup": predicted,
        "costs_ms": costs and _costs_to_ms(costs),
    }


def _costs_to_ms(costs: RoundCosts) -> dict[str, float]:
    return {
        "draft": 1000 * costs.draft_s,
        "verify": 1000 * costs.verify_s,
        "autoregressive_step": 1000 * costs.step_s,
    }


def _split_to_ms(split: RoundSplit) -> dict[str, float | None]:
    return {
        name.removesuffix("_s"): None if seconds is None else 1000 * seconds
        for name, seconds in asdict(split).items()
    }


def _describe_gain(
    mode: ModeOutcome, other: ModeOutcome, baselines: tuple[ModeResult, ModeResult]
) -> dict[str, Any] | None:
    """Describe the gains of `mode` over `other`.

    `baselines` are the autoregressive modes of the targets of the two.
    """
    if isinstance(mode, NotMeasured) or isinstance(other, NotMeasured):
        return None
    base_results, other_base_results = (baseline.prompt_results for baseline in baselines)
    return {
        name: _asdict_or_none(
            estimate_gain(
                name, mode.prompt_results, other.prompt_results, base_results, other_base_results
            )
        )
        for name in GAIN_METRICS
    }


def _list_reasons(modes: dict[str, ModeOutcome]) -> dict[str, str]:
    return {name: mode.reason for name, mode in modes.items() if isinstance(mode, NotMeasured)}


def _asdict_or_none(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
