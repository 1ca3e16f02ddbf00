"""The report of an evaluation: a dictionary as `docs/report.schema.json` says, and files."""

import datetime
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer.measured import DraftRun, Measured, Mode, NotMeasured, Setting
from infer.page import page
from infer.stats import (
    FIGURES,
    GAINS,
    Costs,
    Trace,
    by_position,
    drafts_trees,
    estimate,
    gain,
    itl_s,
    loop_share,
    percentiles_ms,
)
from infer.tables import markdown

SCHEMA_VERSION = 1
TRAINED_MODES = ("chain", "tree")


def build(
    setting: Setting, *, autoregressive: Measured, ngram: Mode, drafts: list[DraftRun]
) -> dict[str, Any]:
    """The whole report; modes must hold the same prompts."""
    traces = autoregressive.traces
    categories: dict[str, set[str]] = {}
    for trace in traces:
        categories.setdefault(trace.category, set()).add(trace.prompt_id)
    return {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": setting.command,
        "versions": setting.versions,
        "device": setting.device,
        "target": {"name": setting.target, "parameters": setting.target_parameters},
        "sampling": setting.sampling,
        "tree": setting.tree,
        "prompts": {
            "count": len(traces),
            "sha256": setting.prompts_sha256,
            "max_new_tokens": setting.max_new_tokens,
            "by_category": {name: len(ids) for name, ids in categories.items()},
        },
        **_section(autoregressive, ngram, drafts),
        "categories": {
            name: _section(
                autoregressive.among(ids),
                ngram.among(ids),
                [draft.among(ids) for draft in drafts],
            )
            for name, ids in categories.items()
        },
        "per_prompt": _per_prompt(
            traces, {"autoregressive": autoregressive, "ngram": ngram}, drafts
        ),
    }


def write(report: dict[str, Any], directory: Path) -> None:
    """report.json, report.md and report.html, each complete or absent."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_text(directory / "report.md", markdown(report))
    write_text(directory / "report.html", page(report))


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name and rename, so that a killed run leaves no half file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _section(autoregressive: Measured, ngram: Mode, drafts: list[DraftRun]) -> dict[str, Any]:
    """All modes on one set of prompts."""
    return {
        "loop_share": loop_share(autoregressive.traces),
        "autoregressive": _mode(autoregressive, autoregressive),
        "ngram": _mode(ngram, autoregressive),
        "not_measured": _reasons({"ngram": ngram}),
        "drafts": [_draft(draft, autoregressive, ngram) for draft in drafts],
    }


def _draft(draft: DraftRun, autoregressive: Measured, ngram: Mode) -> dict[str, Any]:
    """One draft, compared with its own target where it has one."""
    own = draft.target
    plain = own.autoregressive if own else autoregressive
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
        "modes": {name: _mode(mode, plain) for name, mode in draft.modes.items()},
        "not_measured": _reasons(draft.modes),
        "gain": {
            name: {
                "over_untrained": _gain(draft.modes[name], draft.untrained, (plain, plain)),
                "over_ngram": _gain(draft.modes[name], ngram, (plain, autoregressive)),
            }
            for name in TRAINED_MODES
        },
    }


def _mode(mode: Mode, autoregressive: Measured) -> dict[str, Any] | None:
    if isinstance(mode, NotMeasured):
        return None
    traces, exactness = mode.traces, mode.exactness
    figures = {name: _asdict(estimate(name, traces, autoregressive.traces)) for name in FIGURES}
    return {
        "prompts": len(traces),
        "batch": mode.batch,
        "depth": max(trace.depth for trace in traces),
        "nodes": max(max(trace.drafted, default=0) for trace in traces),
        "drafts_trees": drafts_trees(traces),
        **figures,
        "acceptance_by_position": asdict(by_position(traces)),
        "ttft_ms": _asdict(percentiles_ms([trace.prefill_s for trace in traces])),
        "itl_ms": _asdict(percentiles_ms([itl_s(trace) for trace in traces])),
        "e2e_ms": _asdict(percentiles_ms([trace.e2e_s for trace in traces])),
        "verification": mode.verification,
        "lossless": mode.lossless,
        "mismatched_prompts": exactness.mismatched_prompts,
        "near_tie_gap": exactness.near_tie_gap,
        "divergences_beyond_gap": exactness.divergences_beyond_gap,
        "divergences": [asdict(divergence) for divergence in exactness.divergences],
        **_efficiency(mode.costs, figures),
        "graphs_after_warmup": mode.graphs_after_warmup,
    }


def _efficiency(costs: Costs | None, figures: dict[str, Any]) -> dict[str, Any]:
    """The measured speed-up over the predicted one, and what the prediction is made of."""
    if costs is None or figures["speedup"] is None:
        return {"efficiency": None, "predicted_speedup": None, "costs_ms": None}
    predicted = costs.predicted_speedup(figures["acceptance_length"]["mean"])
    return {
        "efficiency": figures["speedup"]["mean"] / predicted,
        "predicted_speedup": predicted,
        "costs_ms": {
            "draft": 1000 * costs.draft_s,
            "verify": 1000 * costs.verify_s,
            "autoregressive_step": 1000 * costs.step_s,
        },
    }


def _gain(mode: Mode, other: Mode, baselines: tuple[Measured, Measured]) -> dict[str, Any] | None:
    """`mode` minus `other`, each of them over the autoregressive mode of its target."""
    if isinstance(mode, NotMeasured) or isinstance(other, NotMeasured):
        return None
    plain, others_plain = (baseline.traces for baseline in baselines)
    return {
        name: _asdict(gain(name, mode.traces, other.traces, plain, others_plain)) for name in GAINS
    }


def _per_prompt(
    order: list[Trace], modes: dict[str, Mode], drafts: list[DraftRun]
) -> list[dict[str, Any]]:
    """What each prompt took in each mode, so that a reader can compute other figures."""
    labelled = modes | {
        f"{draft.name}/{name}": mode for draft in drafts for name, mode in draft.modes.items()
    }
    rows = {
        trace.prompt_id: {"prompt_id": trace.prompt_id, "category": trace.category, "modes": {}}
        for trace in order
    }
    for label, mode in labelled.items():
        for trace in [] if isinstance(mode, NotMeasured) else mode.traces:
            itl = itl_s(trace)
            rows[trace.prompt_id]["modes"][label] = {
                "tokens": len(trace.ids),
                "rounds": trace.rounds,
                "accepted": sum(trace.accepted),
                "drafted": sum(trace.drafted),
                "ttft_ms": 1000 * trace.prefill_s,
                "itl_ms": None if itl is None else 1000 * itl,
                "e2e_ms": 1000 * trace.e2e_s,
            }
    return list(rows.values())


def _reasons(modes: dict[str, Mode]) -> dict[str, str]:
    return {name: mode.reason for name, mode in modes.items() if isinstance(mode, NotMeasured)}


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
