"""Counts what tests/system/test_compiled.py promises, in a process of its own; prints it as JSON.

    python -m tests.support.runs.compiled_run inductor 16 chain dynamic

A fresh process has compiled nothing yet, and returns the memory of its graphs.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.verify.greedy_and_coupled import TypicalRule
from models.device.device import Device
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.drafts.registry import load_draft
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU, VOCAB, batch_of, chain, learn, mixed, new_draft, sampled_texts, tiny_target

LENGTHS = [*range(5, 15), 17, 20, 23, 26, 29, 32, 33, 41, 50, 60]  # twenty; sixteen of the first bucket
NEW = 10
REQUESTS = "requests"  # the name of a run that is no shape and no method
SHAPES = {
    "none": NO_TREE,
    "ngram": chain(3),
    "chain": chain(3),
    "static": TreeConf(kind=TreeKind.static, paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]]).build(),
    "dynamic": TreeConf(depth=3, nodes=6, beam_width=2, children=3).build(),
    "mixed": mixed(),
    "typical": mixed(),  # the same tree, sampled, with candidates that are typical of the target
}
READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")


def prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in LENGTHS]


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Every way of Python to look at a tensor's values."""
    seen: list[str] = []
    kept = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str):
        def read(self, *args):
            seen.append(name)
            return kept[name](self, *args)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield seen
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def decode(decoder: Decoder, texts: list[list[int]]) -> list:
    return [decoder.decode([t], row_ids=[i], max_new_tokens=NEW)[0] for i, t in enumerate(texts)]


def drafts_of(target: Target) -> list[Draft]:
    """Before and after some training: of one shape."""
    untrained, trained = new_draft(target, ttt_steps=3), new_draft(target, ttt_steps=3)
    learn(trained, target, batch_of(sampled_texts(target, count=4, length=24)), steps=60)
    return [untrained, trained]


def method_drafts(name: str, target: Target) -> tuple[Target, list[Draft]]:
    """A method's draft as it comes from a checkpoint, itself before training, and who verifies."""
    case = CASES[name]
    draft = case.build(target)
    learn(draft, target, batch_of(sampled_texts(target, count=4, length=24)), steps=60, lr=case.lr)
    with tempfile.TemporaryDirectory() as folder:
        draft.save(Path(folder), target)
        again = load_draft(Path(folder), target)
    untrained = again.rebuild_untrained(target)
    assert isinstance(untrained, Draft)
    return again.get_verifying_target(target), [untrained, again]


def compiled_loss_apart(name: str, target: Target) -> float:
    """How far gradients of the loss as one traced graph are from those of the eager one."""
    draft = CASES[name].build(target).eval()  # without noise
    batch = batch_of(sampled_texts(target, count=4, length=24))
    seen = target.forward_hidden(
        batch.input_ids, positions=batch.positions, mask=batch.attention_mask(), layers=draft.needs.layers
    )
    trained = [p for p in draft.parameters() if p.requires_grad]
    # not "eager", which does not trace the backward pass
    compiled = replace(CPU, compiles=True, backend="aot_eager").compile(draft.loss)
    ours, theirs = (torch.autograd.grad(loss(batch, seen).total, trained) for loss in (draft.loss, compiled))
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def decoders(name: str, target: Target, drafts: list[Draft]) -> list[Decoder]:
    some: list[Draft | None] = {"none": [None], "ngram": [NgramDraft()]}.get(name, drafts)
    typical = name == "typical"
    return [
        Decoder(
            target,
            draft,
            SHAPES.get(name, SHAPES["mixed"]),
            sampling=SamplingConf(temperature=float(typical)),
            slots=max(LENGTHS) + NEW,
            layers=drafts[0].needs.layers,
            acceptance_rule=TypicalRule() if typical else None,
        )
        for draft in some
    ]


def measure(name: str, backend: str, texts: list[list[int]], target: Target, drafts: list[Draft]) -> dict[str, object]:
    target.device = replace(CPU, compiles=True, backend=backend)
    first, *others = decoders(name, target, drafts)
    decode(first, list({bucket_length(len(text)): text for text in texts}.values()))  # the warm-up
    warm = Device.count_graphs()
    target.model(torch.tensor(texts[:1]))  # another user of the layers, as `generate` is
    with counted_reads() as reads:
        done = [row for decoder in (first, *others) for row in decode(decoder, texts)]
    added = Device.count_graphs() - warm
    target.device = CPU
    eager = [row for decoder in decoders(name, target, drafts) for row in decode(decoder, texts)]
    rounds = sum(len(row.round_s) for row in done)
    return {
        "graphs": warm,
        "added": added,
        "accepted": sum(sum(row.accepted) for row in done),
        "reads": len(reads),
        "rounds_and_first_tokens": rounds + len(done),
        "equal": [(r.ids, r.accepted) for r in done] == [(r.ids, r.accepted) for r in eager],
    }


def mixed_requests(backend: str, target: Target, draft: Draft) -> dict[str, object]:
    """200 requests of every length through four slots, refilled as they end: does any graph come?

    The warm-up is one request of each bucket into an empty decoder and one into a busy one.
    """
    numbers = torch.Generator().manual_seed(8)
    lengths, limits = (torch.randint(1, n, (200,), generator=numbers).tolist() for n in (120, 9))
    texts = [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in lengths]
    stop, found = {"eos_ids": [7, 11], "stop": ["21 5"]}, []
    warm = added = 0
    for device in (replace(CPU, compiles=True, backend=backend), CPU):
        target.device = device
        decoder = Decoder(target, draft, SHAPES["dynamic"], sampling=SamplingConf(), slots=136, batch=4)
        before = Device.count_graphs()
        for length in (9, 90):
            first = [texts[0][:1] * length] * 6
            decoder.decode(first, row_ids=range(6), max_new_tokens=[5, 2, 5, 5, 2, 3])
        warm = max(warm, Device.count_graphs() - before)
        before = Device.count_graphs()
        done = decoder.decode(texts, row_ids=range(200), max_new_tokens=limits, **stop)
        added = max(added, Device.count_graphs() - before)
        found.append([(row.ids, row.accepted) for row in done])
    return {
        "graphs": warm,
        "added": added,
        "equal": found[0] == found[1],
        "buckets": sorted({bucket_length(n) for n in lengths}),
        "accepted": sum(sum(counts) for _, counts in found[0]),
        "early": sum(len(ids) < n for (ids, _), n in zip(found[0], limits, strict=True)),
    }


def keeps_apart(backend: str, texts: list[list[int]]) -> bool:
    """Whether a target that differs by a constant alone is decoded by graphs of its own."""
    compiled = replace(CPU, compiles=True, backend=backend)
    targets = [tiny_target(seed=0, device=compiled, eps=eps) for eps in (1e-6, 1.0)]
    answers = []
    for device in (compiled, CPU):
        for target in targets:
            target.device = device
            decoder = Decoder(target, sampling=SamplingConf(), slots=max(LENGTHS) + NEW)
            answers.append([row.ids for row in decode(decoder, texts)])
    first, second, *eager = answers
    return first != second and [first, second] == eager


def main(backend: str, count: str, *names: str) -> None:
    torch.set_num_threads(1)
    target = tiny_target(seed=0)
    drafts = drafts_of(target)
    found, requests = {}, None
    for name in names:
        if name == REQUESTS:
            requests = mixed_requests(backend, target, drafts[1])
            continue
        some = method_drafts(name, target) if name in CASES else (target, drafts)
        found[name] = measure(name, backend, prompts()[: int(count)], *some)
        if name in CASES:
            found[name]["loss_apart"] = compiled_loss_apart(name, target)
    breaks = dict(counters["graph_break"])
    told = {"modes": found, "breaks": breaks, "mixed": requests}
    if "none" in names:  # once is enough, it needs no draft
        told["keeps_apart"] = keeps_apart(backend, prompts()[:4])
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
