"""Speed-up against batch size: many prompts decoded together, each finished row replaced.

A round's time is shared by the rows at work in it. Summed over prompts the shares are the whole, so
that tokens over shares is throughput, and intervals are over prompts, as everywhere.
"""

from dataclasses import dataclass, replace

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.engine.decode import Decoder, bucket
from infer.measure.eval_modes import Candidate
from infer.measure.exactness import compare
from infer.measure.intervals import Estimate
from infer.measure.metrics import estimate
from infer.measure.records import Exactness, Trace, Yardstick
from infer.measure.results import AtBatch
from infer.measure.timing import in_turns
from models.speculate.tree import NO_TREE, Tree
from models.target.target import Target

PASSES = 2  # each of the two modes first once


@dataclass(kw_only=True)
class Baseline:
    """Autoregressive decoding of one row at a time: whose answers a batch must repeat."""

    decoder: Decoder
    traces: list[Trace]
    yardstick: Yardstick


def at_batches(
    target: Target, one: Candidate, tree: Tree, prompts: list[EvalPrompt], conf: EvaluationConf,
    alone: Baseline,
) -> list[AtBatch]:  # fmt: skip
    """The draft's tree beside autoregressive decoding, at each of the asked batch sizes."""
    return [_at(target, one, tree, prompts, conf, alone, batch) for batch in conf.batches]


def warmed(
    target: Target, one: Candidate, tree: Tree, prompts: list[EvalPrompt], conf: EvaluationConf,
    batch: int,
) -> dict[str, Decoder]:  # fmt: skip
    """The two decoders, with all their graphs."""
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    decoders = {
        name: Decoder(
            target, draft, shape, sampling=conf.sampling, slots=slots, batch=batch,
            layers=one.draft.needs.layers, verification=conf.verifier if draft else None,
        )
        for name, draft, shape in (("plain", None, NO_TREE), ("tree", one.draft, tree))
    }  # fmt: skip
    # one of each padded length, and at least one more than rows: a refill compiles too
    few = list({bucket(len(p.ids)): p for p in prompts}.values())
    few += (prompts * batch)[:batch]
    with target.device.ledger.warming():
        for decoder in decoders.values():
            _decode(decoder, few, conf.new_tokens)
    return decoders


def _at(
    target: Target, one: Candidate, tree: Tree, prompts: list[EvalPrompt], conf: EvaluationConf,
    alone: Baseline, batch: int,
) -> AtBatch:  # fmt: skip
    decoders = warmed(target, one, tree, prompts, conf, batch)
    traces: dict[str, list[Trace]] = {name: [] for name in decoders}
    for number in range(PASSES):
        for name in in_turns(list(decoders), number):
            traces[name] += _decode(decoders[name], prompts, conf.new_tokens)
    exactness = Exactness()  # nothing to compare where answers need not be the same
    if not conf.verifier.ratio:
        exactness = compare(alone.decoder, prompts, alone.traces, traces["tree"], alone.yardstick)
    plain, drafted = (_merged(traces[name]) for name in ("plain", "tree"))

    def figure(name: str, of: list[Trace]) -> Estimate:
        found = estimate(name, of, plain)
        assert found is not None
        return found

    return AtBatch(
        batch=batch, mode="tree", verification=conf.verifier.name, exactness=exactness,
        speedup=figure("speedup", drafted),
        tokens_per_s=figure("tokens_per_s", drafted),
        autoregressive_tokens_per_s=figure("tokens_per_s", plain),
        acceptance_length=figure("acceptance_length", drafted),
    )  # fmt: skip


def _decode(decoder: Decoder, prompts: list[EvalPrompt], count: int) -> list[Trace]:
    rows = decoder.decode(
        [p.ids for p in prompts], row_ids=[p.row_id for p in prompts], max_new_tokens=count,
        eos_ids=decoder.target.eos_ids,
    )  # fmt: skip
    return [
        replace(Trace.of(prompt, row, depth=decoder.depth), round_s=row.share_s)
        for prompt, row in zip(prompts, rows, strict=True)
    ]


def _merged(traces: list[Trace]) -> list[Trace]:
    """One trace a prompt: of its passes, the mean time of each round."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.prompt_id, []).append(trace)
    for passes in found.values():
        first = passes[0]
        first.round_s = [sum(s) / len(s) for s in zip(*(p.round_s for p in passes), strict=True)]
    return [passes[0] for passes in found.values()]
