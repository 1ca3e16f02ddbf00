"""Losses: hand-made cases, identities, and the chunked form against the plain one."""

import importlib.util
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import losses
from models.errors import UserError
from models.losses import (
    LossConf,
    LossName,
    chunked_distillation,
    distillation,
    token_losses,
)

KEPT = torch.tensor([0, 2, 3, 7, 8])


def logits_of(*rows):
    return torch.tensor(rows).log()


def inputs(*, tokens=23, steps=(), kept=None, vocab=11):
    """Random rows of both models, with heads and weights (some 0)."""
    draw = torch.Generator().manual_seed(1)
    draft_vocab = vocab if kept is None else len(kept)
    return {
        "draft_hidden": torch.randn(*steps, tokens, 6, generator=draw).requires_grad_(),
        "target_hidden": torch.randn(tokens, 5, generator=draw),
        "draft_heads": [torch.randn(draft_vocab, 6, generator=draw).requires_grad_()],
        "target_head": torch.randn(vocab, 5, generator=draw),
        "weight": torch.rand(*steps, tokens, generator=draw).sub(0.3).clamp_min(0),
        "labels": None,
        "kept_ids": kept,
    }


def both(args, conf):
    """Value, metrics and gradients of the plain and the chunked form."""
    for form in (distillation, chunked_distillation):
        total, metrics = form(**args, conf=conf)
        grads = torch.autograd.grad(3 * total, [args["draft_hidden"], *args["draft_heads"]])
        yield [total, *metrics.values(), *grads]


def test_soft_ce_by_hand():
    found = token_losses(
        logits_of([0.5, 0.5]), logits_of([0.25, 0.75]), kept_ids=None, conf=LossConf()
    )
    torch.testing.assert_close(found.loss, torch.tensor([math.log(2)]))
    torch.testing.assert_close(found.alpha, torch.tensor([0.75]))


def test_a_reduced_vocabulary_by_hand():
    """The teacher is renormalised to (1/3, 2/3); alpha is not: min(.2, .5) + min(.4, .5) = .6."""
    kept = torch.tensor([0, 2])
    target = logits_of([0.2, 0.3, 0.4, 0.1], [0.2, 0.5, 0.2, 0.1])
    found = token_losses(
        logits_of([0.5, 0.5], [0.25, 0.75]), target, kept_ids=kept, conf=LossConf()
    )
    torch.testing.assert_close(found.alpha, torch.tensor([0.6, 0.4]))
    assert found.covered.tolist() == [True, False]
    assert found.hit.tolist() == [False, False]  # a tie goes to the first; token 1 is not kept
    torch.testing.assert_close(found.loss, torch.tensor([math.log(2), 0.0]))


def test_lk_hybrid_by_hand():
    conf = LossConf(name=LossName.lk_hybrid, lk_eta=2.0)
    found = token_losses(logits_of([0.5, 0.5]), logits_of([0.25, 0.75]), kept_ids=None, conf=conf)
    trust = math.exp(-2 * 0.75)
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    torch.testing.assert_close(found.loss, torch.tensor([trust * kl + (1 - trust) * 0.25]))


def test_alpha_is_one_minus_total_variation():
    draft, target = torch.randn(2, 50, 9)
    found = token_losses(draft, target, kept_ids=None, conf=LossConf())
    variation = (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2
    torch.testing.assert_close(found.alpha, 1 - variation)


def test_lk_hybrid_is_zero_for_a_perfect_draft():
    logits = torch.randn(50, 9)
    conf = LossConf(name=LossName.lk_hybrid)
    found = token_losses(logits, logits, kept_ids=None, conf=conf)
    torch.testing.assert_close(found.loss, torch.zeros(50), atol=1e-6, rtol=0)
    assert found.hit.all()


@pytest.mark.parametrize("steps", [(), (3,)], ids=["flat", "steps"])
@pytest.mark.parametrize("share", [0, 1, 2])
def test_rows_without_weight_teach_nothing(steps, share):
    """They are left out where that is free; half of them, all but few, or all."""
    args = inputs(steps=steps, kept=None)
    tokens = torch.arange(args["weight"].shape[-1])
    args["weight"] = args["weight"] * (tokens % 2 < share) * (share == 2 or tokens > 2)
    plain, chunked = both(args, LossConf(chunk=8))
    for a, b in zip(plain, chunked, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LossName)
@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
@pytest.mark.parametrize("steps", [(), (3,)], ids=["flat", "steps"])
@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_chunks_change_neither_value_nor_gradient(name, kept, steps, chunk):
    args = inputs(steps=steps, kept=kept)
    plain, chunked = both(args, LossConf(name=name, chunk=chunk))
    for a, b in zip(plain, chunked, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_each_step_may_have_a_head_of_its_own(chunk):
    """One of them a view of a larger matrix, one without gradient."""
    args = inputs(steps=(3,))
    whole = torch.randn(15, 6).requires_grad_()
    args["draft_heads"] += [whole[:11], torch.randn(11, 6)]
    results = []
    for form in (distillation, chunked_distillation):
        total, _ = form(**args, conf=LossConf(chunk=chunk))
        learns = [args["draft_hidden"], args["draft_heads"][0], whole]
        results.append([total, *torch.autograd.grad(total, learns)])
    assert all(grad.any() for grad in results[0])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LossName)
def test_the_gradient_is_the_finite_difference(name):
    """The weight lambda of lk_hybrid is a constant for the gradient, hence eta = 0."""
    args = inputs(tokens=5, kept=KEPT)
    conf = LossConf(name=name, chunk=2, lk_eta=0.0)
    base = args["draft_hidden"].detach()
    total, _ = chunked_distillation(**args, conf=conf)
    (grad,) = torch.autograd.grad(total, args["draft_hidden"])
    for index in [(0, 0), (2, 3), (4, 5)]:
        ends = []
        for step in (1e-2, -1e-2):
            moved = base.clone()
            moved[index] += step
            ends.append(chunked_distillation(**args | {"draft_hidden": moved}, conf=conf)[0])
        difference = (ends[0] - ends[1]) / 2e-2
        torch.testing.assert_close(grad[index], difference, atol=2e-3, rtol=1e-2)


def test_uncovered_rows_teach_nothing_and_count_as_misses():
    kept = torch.tensor([0, 1])
    args = inputs(kept=kept)
    args["target_head"] = torch.zeros(11, 5)
    args["target_head"][4, 0], args["target_hidden"][:, 0] = 1.0, 9.0  # token 4, always
    total, metrics = chunked_distillation(**args, conf=LossConf(chunk=4))
    (grad,) = torch.autograd.grad(total, args["draft_hidden"])
    assert total == 0
    assert not grad.any()
    assert metrics["hit"].tolist() == [0, (args["weight"] != 0).sum()]
    assert metrics["covered"][0] == 0


def test_a_head_may_be_a_module_with_bias():
    args, head = inputs(), nn.Linear(5, 11)
    plain, chunked = both(args | {"target_head": head}, LossConf(chunk=4))
    for a, b in zip(plain, chunked, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    assert head.weight.grad is None


def test_bf16_autocast_keeps_the_softmax_in_fp32():
    args = inputs(steps=(2,))
    plain, _ = both(args, LossConf(chunk=8))
    with torch.autocast("cpu", torch.bfloat16):
        _, chunked = both(args, LossConf(chunk=8))
    assert all(tensor.dtype == torch.float32 for tensor in chunked)
    for a, b in zip(plain[:3], chunked[:3], strict=True):
        torch.testing.assert_close(b, a, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_compiles_into_one_graph(bias):
    plain, args = unchecked_losses(), inputs(kept=KEPT)
    conf = plain.LossConf(name=plain.LossName.lk_hybrid, chunk=8)
    if bias:
        args["target_head"] = nn.Linear(5, 11).requires_grad_(False)
    compiled = torch.compile(plain.chunked_distillation, backend="aot_eager", fullgraph=True)
    results = []
    for form in (plain.chunked_distillation, compiled):
        total, _ = form(**args, conf=conf)
        results.append([total, *torch.autograd.grad(total, [args["draft_hidden"]])])
    torch.testing.assert_close(results[0], results[1])


def unchecked_losses():
    """The module without the shape checks of pytest, which torch.compile cannot trace."""
    spec = importlib.util.spec_from_file_location("unchecked_losses", losses.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Largest(TorchDispatchMode):
    """Remembers the most elements any operator has returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize("steps", [(), (4,)], ids=["flat", "steps"])
def test_chunks_never_hold_tokens_by_vocabulary(steps):
    tokens, vocab, chunk = 256, 500, 32
    args = inputs(tokens=tokens, vocab=vocab, steps=steps)
    numel = {}
    for form in (distillation, chunked_distillation):
        with Largest() as largest:
            form(**args, conf=LossConf(chunk=chunk))[0].backward()
        numel[form] = largest.numel
    assert numel[distillation] >= tokens * vocab
    assert numel[chunked_distillation] <= chunk * vocab


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match=r"loss\.chunk"):
        LossConf(chunk=0)
    with pytest.raises(UserError, match=r"loss\.step_decay"):
        LossConf(step_decay=1.5)
