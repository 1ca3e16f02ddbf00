"""Build a report from the results of all modes."""

from collections import Counter
from typing import Any, get_args

from data.eval_prompts.contamination import Contamination
from data.eval_prompts.prompts import EvalPrompt, describe_origin, fingerprint_prompts
from infer.results.metrics import (
    METRICS,
    acceptance_by_position,
    estimate_gain,
    estimate_metric,
    is_looping,
    take_percentiles,
)
from infer.results.records import AUTOREGRESSIVE, ModeResult, PromptResult
from infer.results.schema import (
    SCHEMA_VERSION,
    DraftInfo,
    EvalReport,
    EvalSetup,
    Gain,
    GainMetric,
    Mode,
    ModeFigures,
    PromptRow,
    PromptSet,
    Section,
)

SECONDS_DECIMALS = 6  # decimal places of seconds in rounds.jsonl


def describe_prompts(
    prompts: list[EvalPrompt], path: str | None, *, max_new_tokens: int, contamination: dict[str, Contamination]
) -> PromptSet:
    """Return the description of a report's prompts, which come from `path`."""
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return PromptSet(
        count=len(prompts),
        questions=len({prompt.question for prompt in prompts}),
        sha256=fingerprint_prompts(prompts),
        source=describe_origin(prompts, path),
        chat_template=sum(prompt.chat_template for prompt in prompts),
        lengths={"shortest": lengths[0], "median": lengths[len(lengths) // 2], "longest": lengths[-1]},
        max_new_tokens=max_new_tokens,
        by_category=dict(Counter(prompt.category for prompt in prompts)),
        contamination=contamination,
    )


def build_report(setup: EvalSetup, results: dict[str, ModeResult], drafts: list[DraftInfo]) -> EvalReport:
    """Build the report; all modes must hold the prompts of the setup, in one order."""
    return EvalReport(
        schema_version=SCHEMA_VERSION,
        setup=setup,
        drafts=drafts,
        overall=build_section(results),
        categories={
            name: build_section({key: result.select_category(name) for key, result in results.items()})
            for name in setup.prompts.by_category
        },
        per_prompt=_list_prompt_rows(results),
        rounds=[_describe_rounds(key, result) for key, mode in results.items() for result in mode.prompt_results],
    )


def build_section(results: dict[str, ModeResult]) -> Section:
    """Describe all modes on one set of prompts."""
    answers = [result.generation.ids for result in results[AUTOREGRESSIVE].prompt_results]
    return Section(
        loop_share=sum(map(is_looping, answers)) / len(answers),
        modes={key: _describe_mode(key, results) for key in results},
    )


def _describe_mode(key: str, results: dict[str, ModeResult]) -> Mode:
    result = results[key]
    baseline = results[result.baseline]
    metrics: dict[str, Any] = {name: estimate_metric(name, result, baseline) for name in METRICS}
    tau, speedup = metrics["acceptance_length"], metrics["speedup"]
    figures, split, plain_split, predicted = result.figures, result.split, baseline.split, None
    if speedup and split and plain_split and result.draft_passes is not None:
        predicted = tau.mean * plain_split.plain_step / (split.draft + split.verification)
    return Mode(
        figures=ModeFigures(
            prompts=len(figures),
            questions=len(set(result.questions)),
            depth=result.depth,
            nodes=result.nodes,
            **metrics,
            draft_passes=result.draft_passes,
            predicted_speedup=predicted,
            efficiency=predicted and speedup.mean / predicted,
            acceptance_by_position=acceptance_by_position(result),
            ttft_ms=take_percentiles([row.ttft_ms for row in figures]),
            itl_ms=take_percentiles([row.itl_ms for row in figures]),
            e2e_ms=take_percentiles([row.e2e_ms for row in figures]),
        ),
        verdict=result.exactness.judge(result.verification),
        split_ms=split,
        gains=_describe_gains(key, results),
    )


def _describe_gains(key: str, results: dict[str, ModeResult]) -> dict[Any, Gain]:
    """Describe the gains of a trained draft's chain or tree over what it is to be better than."""
    draft, _, name = key.rpartition("/")
    if name not in ("chain", "tree"):
        return {}
    others = {"untrained": results.get(f"{draft}/untrained"), "ngram": results["ngram"]}
    mode = results[key]
    return {
        other_name: {
            metric: estimate_gain(metric, mode, other, (results[mode.baseline], results[other.baseline]))
            for metric in get_args(GainMetric)
        }
        for other_name, other in others.items()
        if other is not None
    }


def _list_prompt_rows(results: dict[str, ModeResult]) -> list[PromptRow]:
    prompts = [result.prompt for result in results[AUTOREGRESSIVE].prompt_results]
    figures = {key: mode.figures for key, mode in results.items()}
    return [
        PromptRow(
            prompt_id=prompt.id,
            category=prompt.category,
            question=prompt.question,
            turn=prompt.turn,
            prompt_tokens=len(prompt.ids),
            modes={key: rows[number] for key, rows in figures.items()},
        )
        for number, prompt in enumerate(prompts)
    ]


def _describe_rounds(key: str, result: PromptResult) -> dict[str, Any]:
    """Return all that was recorded of a prompt in a mode."""
    prompt, answer = result.prompt, result.generation
    return {
        "prompt_id": prompt.id,
        "category": prompt.category,
        "turn": prompt.turn,
        "mode": key,
        "ids": answer.ids,
        "accepted": answer.accepted,
        "drafted": answer.drafted,
        "round_s": [round(seconds, SECONDS_DECIMALS) for seconds in answer.round_s],
        "prefill_s": round(answer.prefill_s, SECONDS_DECIMALS),
    }
