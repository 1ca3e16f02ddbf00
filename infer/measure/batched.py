"""Measure the speed-up by batch size, when many prompts are decoded together.

The time of a round is shared equally by its active rows: the shares of all prompts add up to the time of all rounds, so
that tokens over shares is the throughput.
"""

from collections.abc import Callable, Iterable
from functools import partial

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.measure.bench import bind_decoders, decode_in_turns, decode_prompts
from infer.measure.eval_modes import DraftUnderTest, build_evaluation_rule
from infer.results.metrics import estimate_metric
from infer.results.records import AUTOREGRESSIVE, Exactness, ModeResult, PromptResult
from infer.results.schema import BatchFigures
from models.targets.target import Target
from models.trees.tree import Tree

NUM_PASSES = 2  # so that each of the two modes goes first once


def build_decoders(
    target: Target, candidate: DraftUnderTest, tree: Tree, prompts: list[EvalPrompt], conf: EvaluationConf, batch: int
) -> dict[str, Decoder]:
    """Return the decoders `autoregressive` and `tree` of `batch` rows."""
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    verifier, draft = candidate.adapted_target or target, candidate.draft
    build = partial(Decoder, verifier, sampling=conf.sampling, slots=slots, batch=batch, layers=draft.needs.layers)
    return {AUTOREGRESSIVE: build(), "tree": build(draft, tree, acceptance_rule=build_evaluation_rule(conf))}


def warm_up_decoders(decoders: Iterable[Decoder], prompts: list[EvalPrompt], conf: EvaluationConf) -> None:
    """Compile all graphs of the decoders."""
    # One prompt of each padded length, and more prompts than rows: a refill has its own graph.
    warmup_prompts = list({bucket_length(len(p.ids)): p for p in prompts}.values())
    for decoder in decoders:
        with decoder.target.device.ledger.warming():
            refill = (prompts * decoder.batch)[: decoder.batch]
            decode_prompts(decoder, warmup_prompts + refill, max_new_tokens=conf.new_tokens)


def measure_batch_size(
    target: Target,
    candidate: DraftUnderTest,
    tree: Tree,
    prompts: list[EvalPrompt],
    conf: EvaluationConf,
    batch: int,
    check_answers: Callable[[list[PromptResult]], Exactness],
) -> BatchFigures:
    """Measure the draft's tree and autoregressive decoding with `batch` rows.

    `check_answers` compares answers with autoregressive decoding of one row at a time. The passes
    of a prompt count together, like turns of a question.
    """
    decoders = build_decoders(target, candidate, tree, prompts, conf, batch)
    warm_up_decoders(decoders.values(), prompts, conf)
    modes = bind_decoders(decoders, max_new_tokens=conf.new_tokens)
    results = decode_in_turns(modes, [prompts] * NUM_PASSES, f"passes with batches of {batch}")
    plain, speculative = (
        ModeResult(prompt_results=results[name], depth=decoder.tree.max_path_length)
        for name, decoder in decoders.items()
    )

    return BatchFigures(
        size=batch,
        speedup=estimate_metric("speedup", speculative, plain),
        tokens_per_s=estimate_metric("tokens_per_s", speculative, plain),
        autoregressive_tokens_per_s=estimate_metric("tokens_per_s", plain, plain),
        acceptance_length=estimate_metric("acceptance_length", speculative, plain),
        verdict=check_answers(results["tree"]).judge(build_evaluation_rule(conf).name),
    )
