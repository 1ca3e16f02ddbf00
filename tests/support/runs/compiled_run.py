"""Count graphs and reads for tests/system/test_compiled.py in a separate process; print them as JSON.

    python -m tests.support.runs.compiled_run inductor 16 chain dynamic

A fresh process has no compiled graphs yet, and frees their memory at its end.
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
from infer.inputs.command_inputs import load_draft_under_test
from infer.verify.greedy_and_coupled import TypicalRule
from models.device.device import Device
from models.drafts.base import Draft
from models.drafts.loss import LossModule
from models.drafts.ngram import NgramDraft
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU, VOCAB, batch_of, chain, learn, mixed, new_draft, sampled_texts, tiny_target

LENGTHS = [*range(5, 15), 17, 20, 23, 26, 29, 32, 33, 41, 50, 60]  # twenty lengths; sixteen are in the first bucket
NEW = 10
REQUESTS = "requests"  # the name of a run that is neither a shape nor a method
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


def draw_prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in LENGTHS]


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Record every read of a tensor's values by Python."""
    seen: list[str] = []
    methods = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str):
        def read(self, *args):
            seen.append(name)
            return methods[name](self, *args)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield seen
    finally:
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)


def decode(decoder: Decoder, texts: list[list[int]]) -> list:
    return [decoder.decode([t], row_ids=[i], max_new_tokens=NEW)[0] for i, t in enumerate(texts)]


def build_drafts(target: Target) -> list[Draft]:
    """Build a draft before and after some training, with the same shape."""
    untrained, trained = new_draft(target, ttt_steps=3), new_draft(target, ttt_steps=3)
    learn(trained, target, batch_of(sampled_texts(target, count=4, length=24)), steps=60)
    return [untrained, trained]


def build_method_drafts(name: str, target: Target) -> tuple[Target, list[Draft]]:
    """Return the verifying target, a method's draft before training, and the draft loaded from a checkpoint."""
    case = CASES[name]
    draft = case.build(target)
    learn(draft, target, batch_of(sampled_texts(target, count=4, length=24)), steps=60, lr=case.lr)
    with tempfile.TemporaryDirectory() as folder:
        draft.save(Path(folder), target)
        loaded = load_draft_under_test(Path(folder), target, name=name)
    assert isinstance(loaded.untrained, Draft)
    return loaded.adapted_target or target, [loaded.untrained, loaded.draft]


def compare_compiled_loss(name: str, target: Target) -> float:
    """Return the largest difference between gradients of the loss as a single traced graph and as eager code."""
    draft = CASES[name].build(target).eval()  # without noise
    batch = batch_of(sampled_texts(target, count=4, length=24))
    seen = target.forward_hidden(
        batch.input_ids, positions=batch.positions, mask=batch.attention_mask(), layers=draft.needs.layers
    )
    trained = [p for p in draft.parameters() if p.requires_grad]
    # not "eager", which does not trace the backward pass
    device = replace(CPU, compiles=True, backend="aot_eager")
    losses = (LossModule(draft, device, compiled=compiled) for compiled in (False, True))
    ours, theirs = (torch.autograd.grad(loss(batch, seen, {}).total, trained) for loss in losses)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def build_decoders(name: str, target: Target, drafts: list[Draft]) -> list[Decoder]:
    chosen: list[Draft | None] = {"none": [None], "ngram": [NgramDraft()]}.get(name, drafts)
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
        for draft in chosen
    ]


def measure(name: str, backend: str, texts: list[list[int]], target: Target, drafts: list[Draft]) -> dict[str, object]:
    target.device = replace(CPU, compiles=True, backend=backend)
    first, *others = build_decoders(name, target, drafts)
    decode(first, list({bucket_length(len(text)): text for text in texts}.values()))  # the warm-up
    warm = Device.count_graphs()
    target.model(torch.tensor(texts[:1]))  # another user of the layers, as `generate` is
    with counted_reads() as reads:
        answers = [row for decoder in (first, *others) for row in decode(decoder, texts)]
    added = Device.count_graphs() - warm
    target.device = CPU
    eager = [row for decoder in build_decoders(name, target, drafts) for row in decode(decoder, texts)]
    rounds = sum(len(row.round_s) for row in answers)
    return {
        "graphs": warm,
        "added": added,
        "accepted": sum(sum(row.accepted) for row in answers),
        "reads": len(reads),
        "rounds_and_first_tokens": rounds + len(answers),
        "equal": [(r.ids, r.accepted) for r in answers] == [(r.ids, r.accepted) for r in eager],
    }


def measure_mixed_requests(backend: str, target: Target, draft: Draft) -> dict[str, object]:
    """Decode 200 requests of every length in four slots that are refilled as they end; count added graphs.

    The warm-up decodes six requests in each bucket: four start in an empty decoder, two in a busy one.
    """
    numbers = torch.Generator().manual_seed(8)
    lengths, limits = (torch.randint(1, n, (200,), generator=numbers).tolist() for n in (120, 9))
    texts = [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in lengths]
    stop, outputs = {"eos_ids": [7, 11], "stop": ["21 5"]}, []
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
        answers = decoder.decode(texts, row_ids=range(200), max_new_tokens=limits, **stop)
        added = max(added, Device.count_graphs() - before)
        outputs.append([(row.ids, row.accepted) for row in answers])
    return {
        "graphs": warm,
        "added": added,
        "equal": outputs[0] == outputs[1],
        "buckets": sorted({bucket_length(n) for n in lengths}),
        "accepted": sum(sum(counts) for _, counts in outputs[0]),
        "early": sum(len(ids) < n for (ids, _), n in zip(outputs[0], limits, strict=True)),
    }


def keeps_apart(backend: str, texts: list[list[int]]) -> bool:
    """Return whether targets that differ only by a constant are decoded by separate graphs."""
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
    drafts = build_drafts(target)
    modes, requests = {}, None
    for name in names:
        if name == REQUESTS:
            requests = measure_mixed_requests(backend, target, drafts[1])
            continue
        models = build_method_drafts(name, target) if name in CASES else (target, drafts)
        modes[name] = measure(name, backend, draw_prompts()[: int(count)], *models)
        if name in CASES:
            modes[name]["loss_apart"] = compare_compiled_loss(name, target)
    breaks = dict(counters["graph_break"])
    results = {"modes": modes, "breaks": breaks, "mixed": requests}
    if "none" in names:  # it needs no draft, so that once is enough
        results["keeps_apart"] = keeps_apart(backend, draw_prompts()[:4])
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
