"""Measure the speed-up by batch size, when many prompts are decoded together.

A finished row is replaced by the next prompt. The time of a round is shared equally by its active
rows. The shares of all prompts add up to the time of all rounds, so that tokens over shares is the
throughput, and intervals are over prompts as everywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.measure.eval_modes import DraftUnderTest, build_evaluation_rule
from infer.measure.intervals import Estimate
from infer.measure.metrics import estimate_metric
from infer.measure.records import Exactness, PromptResult
from infer.measure.report_schema import BatchSection
from infer.measure.timing import alternate_order
from models.console import track_progress
from models.speculate.tree import NO_TREE, Tree
from models.target.target import Target

NUM_PASSES = 2  # so that each of the two modes goes first once


def build_decoders(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    batch: int,
) -> dict[str, Decoder]:
    """Return the decoders `plain` and `tree` of `batch` rows."""
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    return {
        name: Decoder(
            candidate.adapted_target or target, draft, draft_tree, sampling=conf.sampling,
            slots=slots, batch=batch, layers=candidate.draft.needs.layers,
            acceptance_rule=build_evaluation_rule(conf) if draft else None,
        )
        for name, draft, draft_tree in (("plain", None, NO_TREE), ("tree", candidate.draft, tree))
    }  # fmt: skip


def warm_up_decoders(
    decoders: Iterable[Decoder], prompts: list[EvalPrompt], conf: EvaluationConf
) -> None:
    """Compile all graphs of the decoders."""
    # One prompt of each padded length, and more prompts than rows: a refill has its own graph.
    warmup_prompts = list({bucket_length(len(p.ids)): p for p in prompts}.values())
    for decoder in decoders:
        with decoder.target.device.ledger.warming():
            refill = (prompts * decoder.batch)[: decoder.batch]
            decode_prompts(decoder, warmup_prompts + refill, conf.new_tokens)


def measure_batch_size(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    batch: int,
    check_answers: Callable[[list[PromptResult]], Exactness],
) -> BatchSection:
    """Measure the draft's tree and autoregressive decoding with `batch` rows.

    `check_answers` compares answers with autoregressive decoding of one row at a time.
    """
    decoders = build_decoders(target, candidate, tree, prompts, conf, batch)
    warm_up_decoders(decoders.values(), prompts, conf)
    passes: dict[str, list[list[PromptResult]]] = {name: [] for name in decoders}
    for number in track_progress(range(NUM_PASSES), f"passes with batches of {batch}"):
        for name in alternate_order(list(decoders), number):
            passes[name].append(decode_prompts(decoders[name], prompts, conf.new_tokens))
    plain_results, tree_results = (
        list(map(average_passes, *passes[name])) for name in ("plain", "tree")
    )

    def estimate(name: str, mode_results: list[PromptResult]) -> Estimate:
        value = estimate_metric(name, mode_results, plain_results)
        assert value is not None
        return value

    return BatchSection(
        draft=candidate.name, batch=batch, mode="tree",
        speedup=estimate("speedup", tree_results),
        tokens_per_s=estimate("tokens_per_s", tree_results),
        autoregressive_tokens_per_s=estimate("tokens_per_s", plain_results),
        acceptance_length=estimate("acceptance_length", tree_results),
        **vars(check_answers([*chain(*passes["tree"])]).judge(build_evaluation_rule(conf).name)),
    )  # fmt: skip


def decode_prompts(
    decoder: Decoder, prompts: list[EvalPrompt], max_new_tokens: int
) -> list[PromptResult]:
    """Decode the prompts; in the results, the time of a round is the row's share of it."""
    generations = decoder.decode(
        [p.ids for p in prompts], row_ids=[p.row_id for p in prompts],
        max_new_tokens=max_new_tokens, eos_ids=decoder.target.eos_ids,
    )  # fmt: skip
    return [
        PromptResult(
            prompt=prompt,
            generation=replace(generation, round_s=generation.round_share_s),
            depth=decoder.depth,
        )
        for prompt, generation in zip(prompts, generations, strict=True)
    ]


def average_passes(*results: PromptResult) -> PromptResult:
    """Return the first of a prompt's results in several passes, its rounds as long as in all.

    Passes may differ in answers and rounds: on some devices sums of a batch have no fixed order.
    """
    first, rounds = results[0].generation, sum(result.generation.rounds for result in results)
    if not first.rounds:
        return results[0]
    mean_s = sum(result.generation.decode_s for result in results) / rounds
    scale = mean_s * first.rounds / first.decode_s
    return replace(
        results[0], generation=replace(first, round_s=[scale * s for s in first.round_s])
    )
