"""What a report holds: a dictionary as `docs/report.schema.json` says."""

import datetime
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from infer.measure.by_length import by_prompt_length, lengths
from infer.measure.records import Trace, itl_s
from infer.measure.results import DraftRun, Measured, Mode, NotMeasured, Setting
from infer.measure.summary import describe_batch, section

SCHEMA_VERSION = 3
DECIMALS = 6  # of seconds in rounds.jsonl


class Report(dict[str, Any]):
    """What report.json holds; `rounds` stands beside it, a line of rounds.jsonl each."""

    def __init__(self, content: dict[str, Any], rounds: list[dict[str, Any]]):
        super().__init__(content)
        self.rounds = rounds


def build(
    setting: Setting, *, autoregressive: Measured, ngram: Mode, drafts: list[DraftRun]
) -> Report:
    """The whole report; modes must hold the same prompts."""
    traces = autoregressive.traces
    categories: dict[str, set[str]] = {}
    for trace in traces:
        categories.setdefault(trace.category, set()).add(trace.prompt_id)
    labelled = {"autoregressive": autoregressive, "ngram": ngram} | {
        f"{draft.name}/{name}": mode for draft in drafts for name, mode in draft.modes.items()
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": setting.command,
        "versions": setting.versions,
        "device": setting.device,
        "graphs": setting.graphs,
        "target": {"name": setting.target, "parameters": setting.target_parameters},
        "sampling": setting.sampling,
        "tree": setting.tree,
        "prompts": {
            "count": len(traces),
            "questions": len({trace.question for trace in traces}),
            "sha256": setting.prompts_sha256,
            "source": setting.prompts_source,
            "chat_template": setting.prompts_rendered,
            "lengths": lengths(traces),
            "max_new_tokens": setting.max_new_tokens,
            "by_category": {name: len(ids) for name, ids in categories.items()},
            "contamination": {
                draft.name: asdict(draft.contamination) for draft in drafts if draft.contamination
            },
        },
        **section(autoregressive, ngram, drafts, setting.target_weight_bytes),
        "categories": {
            name: section(
                autoregressive.among(ids),
                ngram.among(ids),
                [draft.among(ids) for draft in drafts],
                setting.target_weight_bytes,
            )
            for name, ids in categories.items()
        },
        **_beside(drafts),
        "by_prompt_length": by_prompt_length(traces, drafts),
        "per_prompt": _per_prompt(traces, labelled),
    }
    return Report(content, list(_rounds(labelled)))


def _beside(drafts: list[DraftRun]) -> dict[str, Any]:
    """What was measured of drafts apart from the modes."""
    return {
        "batches": [
            {"draft": draft.name} | describe_batch(at) for draft in drafts for at in draft.batches
        ],
        "replay": {draft.name: asdict(draft.replayed) for draft in drafts if draft.replayed},
        "samples": [{"draft": draft.name} | asdict(s) for draft in drafts for s in draft.samples],
    }


def _per_prompt(order: list[Trace], labelled: dict[str, Mode]) -> list[dict[str, Any]]:
    """What each prompt took in each mode, so that a reader can compute other figures."""
    rows = {
        trace.prompt_id: {
            "prompt_id": trace.prompt_id,
            "category": trace.category,
            "question": trace.question,
            "turn": trace.turn,
            "prompt_tokens": trace.prompt_tokens,
            "modes": {},
        }
        for trace in order
    }
    for label, trace in _traces(labelled):
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


def _rounds(labelled: dict[str, Mode]) -> Iterator[dict[str, Any]]:
    """Everything that was recorded: one line a prompt and mode."""
    for label, trace in _traces(labelled):
        yield {
            "prompt_id": trace.prompt_id,
            "category": trace.category,
            "turn": trace.turn,
            "mode": label,
            "ids": trace.ids,
            "accepted": trace.accepted,
            "drafted": trace.drafted,
            "round_s": [round(seconds, DECIMALS) for seconds in trace.round_s],
            "prefill_s": round(trace.prefill_s, DECIMALS),
        }


def _traces(labelled: dict[str, Mode]) -> Iterator[tuple[str, Trace]]:
    for label, mode in labelled.items():
        if not isinstance(mode, NotMeasured):
            yield from ((label, trace) for trace in mode.traces)
