"""One part of a report as JSON will hold it: every mode on one set of prompts."""

from dataclasses import asdict
from typing import Any

from infer.measure.intervals import Estimate
from infer.measure.metrics import FIGURES, GAINS, estimate, gain, mbsu
from infer.measure.records import (
    Costs,
    by_position,
    drafts_trees,
    itl_s,
    loop_share,
    percentiles_ms,
)
from infer.measure.results import AtBatch, DraftRun, Judged, Measured, Mode, NotMeasured, Split

TRAINED_MODES = ("chain", "tree")


def section(
    autoregressive: Measured, ngram: Mode, drafts: list[DraftRun], target_bytes: int | None
) -> dict[str, Any]:
    """All modes on one set of prompts."""
    return {
        "loop_share": loop_share(autoregressive.traces),
        "autoregressive": _mode(autoregressive, autoregressive),
        "ngram": _mode(ngram, autoregressive, bytes_ratio=0.0),
        "not_measured": _reasons({"ngram": ngram}),
        "drafts": [_draft(draft, autoregressive, ngram, target_bytes) for draft in drafts],
    }


def _draft(
    draft: DraftRun, autoregressive: Measured, ngram: Mode, target_bytes: int | None
) -> dict[str, Any]:
    """One draft, compared with its own target where it has one."""
    own = draft.target
    plain = own.autoregressive if own else autoregressive
    verifier_bytes = own.weight_bytes if own else target_bytes
    ratio = draft.memory.weights / verifier_bytes if verifier_bytes else None
    return {
        "name": draft.name,
        "method": draft.method,
        "parameters": draft.parameters,
        "memory_bytes": asdict(draft.memory),
        "target": own
        and {
            "name": own.name,
            "parameters": own.parameters,
            "adapted_from": own.adapted_from,
            "changed_answers": own.changed_answers(autoregressive),
        },
        "modes": {
            name: _mode(mode, plain, bytes_ratio=ratio) for name, mode in draft.modes.items()
        },
        "not_measured": _reasons(draft.modes),
        "gain": {
            name: {
                "over_untrained": _gain(draft.modes[name], draft.untrained, (plain, plain)),
                "over_ngram": _gain(draft.modes[name], ngram, (plain, autoregressive)),
            }
            for name in TRAINED_MODES
        },
    }


def _mode(
    mode: Mode, autoregressive: Measured, *, bytes_ratio: float | None = None
) -> dict[str, Any] | None:
    """`bytes_ratio`: the draft's weights over the target's."""
    if isinstance(mode, NotMeasured):
        return None
    traces = mode.traces
    found = {name: estimate(name, traces, autoregressive.traces) for name in FIGURES}
    figures = {name: _asdict(figure) for name, figure in found.items()}
    return {
        "prompts": len(traces),
        "questions": len({trace.question for trace in traces}),
        "batch": mode.batch,
        "depth": max(trace.depth for trace in traces),
        "nodes": max(max(trace.drafted, default=0) for trace in traces),
        "drafts_trees": drafts_trees(traces),
        **figures,
        **_memory_bound(mode, found["acceptance_length"], bytes_ratio),
        "acceptance_by_position": asdict(by_position(traces)),
        "ttft_ms": _asdict(percentiles_ms([trace.prefill_s for trace in traces])),
        "itl_ms": _asdict(percentiles_ms([itl_s(trace) for trace in traces])),
        "e2e_ms": _asdict(percentiles_ms([trace.e2e_s for trace in traces])),
        **describe_verdict(mode),
        **_efficiency(mode, figures),
        "split_ms": mode.split and _milliseconds(mode.split),
        "bottleneck": mode.bottleneck,
        "graphs_after_warmup": mode.graphs_after_warmup,
    }


def describe_verdict(mode: Judged) -> dict[str, Any]:
    """Whether the answers are the target's, and what that is known from."""
    exactness = mode.exactness
    return {
        "verification": mode.verification,
        "lossy": mode.lossy,
        "lossless": mode.lossless,
        "mismatched_prompts": exactness.mismatched_prompts,
        "near_tie_gap": exactness.yardstick.near_tie_gap,
        "explained_gap": exactness.yardstick.explained_gap,
        "divergences_beyond_gap": exactness.divergences_beyond_gap,
        "divergences": [asdict(divergence) for divergence in exactness.divergences],
    }


def describe_batch(at: AtBatch) -> dict[str, Any]:
    """A mode with so many rows at a time."""
    figures = ("speedup", "tokens_per_s", "autoregressive_tokens_per_s", "acceptance_length")
    return {
        "batch": at.batch,
        "mode": at.mode,
        **{name: asdict(getattr(at, name)) for name in figures},
        **describe_verdict(at),
    }


def _memory_bound(mode: Measured, tau: Estimate | None, ratio: float | None) -> dict[str, Any]:
    passes = mode.draft_passes
    if tau is None or passes is None or ratio is None:
        return {"draft_passes": passes, "mbsu": None}
    figure = mbsu(tau, draft_passes=passes, bytes_ratio=ratio)
    return {"draft_passes": passes, "mbsu": asdict(figure)}


def _efficiency(mode: Measured, figures: dict[str, Any]) -> dict[str, Any]:
    """The measured speed-up over the predicted one, and what the prediction is made of."""
    costs, speedup = mode.costs, figures["speedup"]
    if speedup is None:
        return {"efficiency": None, "predicted_speedup": None, "costs_ms": None}
    predicted = costs and costs.predicted_speedup(figures["acceptance_length"]["mean"])
    return {
        "efficiency": predicted and speedup["mean"] / predicted,
        "predicted_speedup": predicted,
        "costs_ms": costs and _costs(costs),
    }


def _costs(costs: Costs) -> dict[str, float]:
    return {
        "draft": 1000 * costs.draft_s,
        "verify": 1000 * costs.verify_s,
        "autoregressive_step": 1000 * costs.step_s,
    }


def _milliseconds(split: Split) -> dict[str, float | None]:
    return {
        name.removesuffix("_s"): None if seconds is None else 1000 * seconds
        for name, seconds in asdict(split).items()
    }


def _gain(mode: Mode, other: Mode, baselines: tuple[Measured, Measured]) -> dict[str, Any] | None:
    """`mode` minus `other`, each of them over the autoregressive mode of its target."""
    if isinstance(mode, NotMeasured) or isinstance(other, NotMeasured):
        return None
    plain, others_plain = (baseline.traces for baseline in baselines)
    return {
        name: _asdict(gain(name, mode.traces, other.traces, plain, others_plain)) for name in GAINS
    }


def _reasons(modes: dict[str, Mode]) -> dict[str, str]:
    return {name: mode.reason for name, mode in modes.items() if isinstance(mode, NotMeasured)}


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
