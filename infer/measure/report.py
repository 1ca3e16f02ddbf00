"""Build the content of a report: a dictionary that follows `docs/report.schema.json`."""

import datetime
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from infer.measure.by_length import summarize_by_length, summarize_lengths
from infer.measure.records import PromptResult, inter_token_latency
from infer.measure.results import DraftResult, EvalSetup, ModeOutcome, ModeResult, NotMeasured
from infer.measure.summary import build_section, describe_batch

SCHEMA_VERSION = 3
SECONDS_DECIMALS = 6  # decimal places of seconds in rounds.jsonl


class EvalReport(dict[str, Any]):
    """The content of report.json; each item of `rounds` is a line of rounds.jsonl beside it."""

    def __init__(self, content: dict[str, Any], rounds: list[dict[str, Any]]):
        super().__init__(content)
        self.rounds = rounds


def build_report(
    setup: EvalSetup, *, autoregressive: ModeResult, ngram: ModeOutcome, drafts: list[DraftResult]
) -> EvalReport:
    """Build the report; all modes must hold the same prompts."""
    results = autoregressive.prompt_results
    categories: dict[str, set[str]] = {}
    for result in results:
        categories.setdefault(result.category, set()).add(result.prompt_id)
    modes_by_label = {"autoregressive": autoregressive, "ngram": ngram} | {
        f"{draft.name}/{name}": mode for draft in drafts for name, mode in draft.modes.items()
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": setup.command,
        "versions": setup.versions,
        "device": setup.device,
        "graphs": setup.graphs,
        "target": {"name": setup.target, "parameters": setup.target_parameters},
        "sampling": setup.sampling,
        "tree": setup.tree,
        "prompts": {
            "count": len(results),
            "questions": len({result.question for result in results}),
            "sha256": setup.prompts_sha256,
            "source": setup.prompts_source,
            "chat_template": setup.num_templated_prompts,
            "lengths": summarize_lengths(results),
            "max_new_tokens": setup.max_new_tokens,
            "by_category": {name: len(ids) for name, ids in categories.items()},
            "contamination": {
                draft.name: asdict(draft.contamination) for draft in drafts if draft.contamination
            },
        },
        **build_section(autoregressive, ngram, drafts, setup.target_weight_bytes),
        "categories": {
            name: build_section(
                autoregressive.select_prompts(ids),
                ngram.select_prompts(ids),
                [draft.select_prompts(ids) for draft in drafts],
                setup.target_weight_bytes,
            )
            for name, ids in categories.items()
        },
        **_describe_extras(drafts),
        "by_prompt_length": summarize_by_length(results, drafts),
        "per_prompt": _per_prompt_rows(results, modes_by_label),
    }
    return EvalReport(content, list(_round_records(modes_by_label)))


def _describe_extras(drafts: list[DraftResult]) -> dict[str, Any]:
    """Describe what was measured of the drafts apart from their modes."""
    return {
        "batches": [
            {"draft": draft.name} | describe_batch(batch_result)
            for draft in drafts
            for batch_result in draft.batch_results
        ],
        "replay": {
            draft.name: asdict(draft.replay_result) for draft in drafts if draft.replay_result
        },
        "samples": [
            {"draft": draft.name} | asdict(sample) for draft in drafts for sample in draft.samples
        ],
    }


def _per_prompt_rows(
    results: list[PromptResult], modes_by_label: dict[str, ModeOutcome]
) -> list[dict[str, Any]]:
    """List the raw numbers of each prompt and mode, from which a reader can compute metrics."""
    rows = {
        result.prompt_id: {
            "prompt_id": result.prompt_id,
            "category": result.category,
            "question": result.question,
            "turn": result.turn,
            "prompt_tokens": result.prompt_tokens,
            "modes": {},
        }
        for result in results
    }
    for label, result in _iterate_results(modes_by_label):
        itl = inter_token_latency(result)
        rows[result.prompt_id]["modes"][label] = {
            "tokens": len(result.ids),
            "rounds": result.rounds,
            "accepted": sum(result.accepted),
            "drafted": sum(result.drafted),
            "ttft_ms": 1000 * result.prefill_s,
            "itl_ms": None if itl is None else 1000 * itl,
            "e2e_ms": 1000 * result.e2e_s,
        }
    return list(rows.values())


def _round_records(modes_by_label: dict[str, ModeOutcome]) -> Iterator[dict[str, Any]]:
    """Yield all that was recorded, one record for each prompt and mode."""
    for label, result in _iterate_results(modes_by_label):
        yield {
            "prompt_id": result.prompt_id,
            "category": result.category,
            "turn": result.turn,
            "mode": label,
            "ids": result.ids,
            "accepted": result.accepted,
            "drafted": result.drafted,
            "round_s": [round(seconds, SECONDS_DECIMALS) for seconds in result.round_s],
            "prefill_s": round(result.prefill_s, SECONDS_DECIMALS),
        }


def _iterate_results(modes_by_label: dict[str, ModeOutcome]) -> Iterator[tuple[str, PromptResult]]:
    for label, mode in modes_by_label.items():
        if not isinstance(mode, NotMeasured):
            yield from ((label, result) for result in mode.prompt_results)
