"""Measure the speed-up by batch size, where many prompts are decoded together.

A finished row is replaced by the next prompt. The time of a round is shared equally by its active
rows. The shares of all prompts add up to the time of all rounds, so that tokens over shares is the
throughput, and intervals are over prompts as everywhere.
"""

from dataclasses import dataclass, replace

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.exactness import compare_answers
from infer.measure.intervals import Estimate
from infer.measure.metrics import estimate_metric
from infer.measure.records import Exactness, LogitTolerance, PromptResult
from infer.measure.results import BatchResult
from infer.measure.timing import alternate_order
from models.speculate.tree import NO_TREE, Tree
from models.target.target import Target

NUM_PASSES = 2  # so that each of the two modes goes first once


@dataclass(kw_only=True)
class Baseline:
    """Autoregressive decoding of one row at a time, whose answers a batch must repeat."""

    decoder: Decoder
    prompt_results: list[PromptResult]
    tolerance: LogitTolerance


def measure_batch_sizes(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    baseline: Baseline,
) -> list[BatchResult]:
    """Measure the draft's tree and autoregressive decoding at each configured batch size."""
    return [
        _measure_batch_size(target, candidate, tree, prompts, conf, baseline, batch)
        for batch in conf.batches
    ]


def build_warm_decoders(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    batch: int,
) -> dict[str, Decoder]:
    """Build the decoders `plain` and `tree`, with all their graphs compiled."""
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    decoders = {
        name: Decoder(
            target, draft, draft_tree, sampling=conf.sampling, slots=slots, batch=batch,
            layers=candidate.draft.needs.layers,
            acceptance_rule=conf.acceptance_rule if draft else None,
        )
        for name, draft, draft_tree in (("plain", None, NO_TREE), ("tree", candidate.draft, tree))
    }  # fmt: skip
    # One prompt of each padded length, and more prompts than rows, because a refill is a graph too.
    warmup_prompts = list({bucket_length(len(p.ids)): p for p in prompts}.values())
    warmup_prompts += (prompts * batch)[:batch]
    with target.device.ledger.warming():
        for decoder in decoders.values():
            _decode_prompts(decoder, warmup_prompts, conf.new_tokens)
    return decoders


def _measure_batch_size(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    baseline: Baseline,
    batch: int,
) -> BatchResult:
    decoders = build_warm_decoders(target, candidate, tree, prompts, conf, batch)
    results: dict[str, list[PromptResult]] = {name: [] for name in decoders}
    for number in range(NUM_PASSES):
        for name in alternate_order(list(decoders), number):
            results[name] += _decode_prompts(decoders[name], prompts, conf.new_tokens)
    exactness = Exactness()  # ratio tests draw other answers: there is nothing to compare
    if not conf.acceptance_rule.is_ratio_test:
        exactness = compare_answers(
            baseline.decoder, prompts, baseline.prompt_results, results["tree"], baseline.tolerance
        )
    plain_results, tree_results = (_average_passes(results[name]) for name in ("plain", "tree"))

    def estimate(name: str, mode_results: list[PromptResult]) -> Estimate:
        value = estimate_metric(name, mode_results, plain_results)
        assert value is not None
        return value

    return BatchResult(
        batch=batch, mode="tree", verification=conf.acceptance_rule.name, exactness=exactness,
        speedup=estimate("speedup", tree_results),
        tokens_per_s=estimate("tokens_per_s", tree_results),
        autoregressive_tokens_per_s=estimate("tokens_per_s", plain_results),
        acceptance_length=estimate("acceptance_length", tree_results),
    )  # fmt: skip


def _decode_prompts(
    decoder: Decoder, prompts: list[EvalPrompt], max_new_tokens: int
) -> list[PromptResult]:
    generations = decoder.decode(
        [p.ids for p in prompts], row_ids=[p.row_id for p in prompts],
        max_new_tokens=max_new_tokens, eos_ids=decoder.target.eos_ids,
    )  # fmt: skip
    return [
        replace(
            PromptResult.from_generation(prompt, generation, depth=decoder.depth),
            round_s=generation.round_share_s,
        )
        for prompt, generation in zip(prompts, generations, strict=True)
    ]


def _average_passes(results: list[PromptResult]) -> list[PromptResult]:
    """Merge the passes of each prompt into one result with the mean time of each round."""
    passes_by_prompt: dict[str, list[PromptResult]] = {}
    for result in results:
        passes_by_prompt.setdefault(result.prompt_id, []).append(result)
    for passes in passes_by_prompt.values():
        first = passes[0]
        first.round_s = [sum(s) / len(s) for s in zip(*(p.round_s for p in passes), strict=True)]
    return [passes[0] for passes in passes_by_prompt.values()]
