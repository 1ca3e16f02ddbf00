"""Losses against the k likeliest tokens of the target are exact divergences of the coarse distributions."""

from functools import partial

import pytest
import torch

from models.losses.chunked import chunked_distillation_loss, evaluate_chunk
from models.losses.config import LossConf, LossName
from models.losses.distributions import TopKLogits
from tests.support.models.loss_cases import (
    DRAFT_IDS,
    FORMS,
    assert_all_close,
    build_conf,
    define_loss,
    differentiate,
    differentiate_both,
    draw_inputs,
    each_loss,
    each_steps,
    each_vocabulary,
)
from tests.support.models.watching import LargestTensor

K = 4


def coarsen_target(args, k=K):
    """Replace the target of the rows by its k likeliest tokens and the probability of all others."""
    return args | {
        "target_hidden_or_topk": TopKLogits.from_logits(args["target_hidden_or_topk"] @ args["target_head"].T, k)
    }


def compute_reference(args, conf, k=K):
    """Compute the loss of the coarse distributions in fp64, with every sum written out."""
    logits = args["draft_hidden"].double() @ args["draft_heads"][0].double().T
    target = (args["target_hidden_or_topk"] @ args["target_head"].T).double().softmax(-1)
    draft_ids = range(target.shape[-1]) if args["kept_ids"] is None else args["kept_ids"].tolist()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(target)):
        weight, label = args["weight"][..., row], int(args["labels"][row])
        order = target[row].argsort(descending=True).tolist()
        taught = label if conf.name is LossName.ce else order[0]
        if taught not in draft_ids:
            continue
        top = [token for token in order[:k] if token in draft_ids]
        drafts = logits[..., row, :].softmax(-1)
        draft = [drafts[..., draft_ids.index(token)] for token in top]
        draft.append(sum((drafts[..., i] for i, token in enumerate(draft_ids) if token not in top), 0 * draft[0]))
        probs = torch.stack([target[row, token] for token in top])
        probs = torch.cat([probs, target[row, order[k:]].sum()[None]])
        own = drafts[..., draft_ids.index(label)] if conf.name is LossName.ce else None
        loss = define_loss(conf, draft=torch.stack(draft, -1), target=probs, label=own, likely=torch.arange(len(probs)))
        total = total + (weight * loss).sum()
    return total


@each_loss
@each_vocabulary
@each_steps
def test_value_and_gradient_are_those_of_the_coarse_distributions(name, draft_ids, steps):
    args, conf = draw_inputs(steps=steps, draft_ids=draft_ids, spread=0.7), build_conf(name)
    total = compute_reference(args, conf)
    learns = [args["draft_hidden"], *args["draft_heads"]]
    expected = [total.float(), *torch.autograd.grad(3 * total, learns)]
    for results in differentiate_both(coarsen_target(args), conf):
        assert_all_close([results[0], *results[-2:]], expected)


@each_loss
@each_vocabulary
def test_the_likeliest_tokens_are_the_full_target_if_they_are_all_tokens(name, draft_ids):
    args, conf = draw_inputs(steps=(2,), draft_ids=draft_ids), build_conf(name)
    for form in FORMS.values():
        expected = differentiate(form, args, conf)
        for k in (11, 99):
            assert_all_close(differentiate(form, coarsen_target(args, k), conf), expected)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@each_loss
def test_sharp_distributions_and_rows_without_any_stay_finite(name, spread, monkeypatch):
    """A store reads as zeros where nothing is stored; a bucket may underflow."""
    args = coarsen_target(draw_inputs(steps=(2,), draft_ids=DRAFT_IDS, spread=spread))
    empty = torch.arange(23) % 3 == 0
    args["target_hidden_or_topk"] = args["target_hidden_or_topk"].map_tensors(
        lambda t: t.masked_fill(empty.reshape(-1, *[1] * (t.ndim - 1)), 0)
    )
    args["weight"] = args["weight"] * ~empty
    for results in differentiate_both(args, build_conf(name)):
        assert all(tensor.isfinite().all() for tensor in results)
        assert results[-1].any()
    rows = differentiate(chunked_distillation_loss, args, build_conf(name))
    # an accelerator computes the rows without weight too
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_all_close(differentiate(chunked_distillation_loss, args, build_conf(name)), rows)


@each_vocabulary
def test_alpha_is_overestimated_by_at_most_the_probability_of_the_bucket(draft_ids):
    """Hits and cover are exact; probability that both leave to the bucket counts as agreement."""
    args, conf = draw_inputs(draft_ids=draft_ids, spread=0.5), build_conf(LossName.tv)
    args["draft_hidden"] = args["draft_hidden"].detach().expand(23, 23, 6)
    args["weight"] = torch.eye(23)  # a step for every row
    _, exact = chunked_distillation_loss(**args, conf=conf)
    known = coarsen_target(args)
    _, metrics = chunked_distillation_loss(**known, conf=conf)
    for name in ("hit", "covered"):
        assert torch.equal(metrics[name], exact[name])
    over = metrics["alpha"][:, 0] - exact["alpha"][:, 0]
    assert (over > -1e-6).all()
    assert (over <= known["target_hidden_or_topk"].rest + 1e-6).all()
    assert (over > 0.01).any()


@pytest.mark.parametrize("vocab", [16_385, 151_936])
def test_the_likeliest_tokens_of_a_wide_vocabulary_are_those_of_a_sort(vocab):
    logits = 4 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    log_probs, ids = logits.log_softmax(-1).sort(-1, descending=True)
    for k in (1, 64):
        top = TopKLogits.from_logits(logits, k)
        assert torch.equal(top.log_probs, log_probs[:, :k])
        assert torch.equal(top.ids, ids[:, :k])
        torch.testing.assert_close(top.rest, log_probs[:, k:].exp().sum(-1))


def test_a_tiny_rest_is_not_lost():
    """In fp32, 1 - (sum of the top) would be 0."""
    top = TopKLogits.from_logits(torch.tensor([[30.0, 0.0, 0.0]]), 1)
    torch.testing.assert_close(top.rest, torch.tensor([2 * torch.tensor(-30.0).exp()]))


@each_loss
def test_the_targets_head_is_not_applied_and_chunks_stay_small(name):
    tokens, vocab, chunk = 256, 500, 32
    args = coarsen_target(draw_inputs(tokens=tokens, vocab=vocab)) | {"target_head": torch.empty(0, 0)}
    with LargestTensor() as largest:
        chunked_distillation_loss(**args, conf=build_conf(name, logits_chunk=chunk))[0].backward()
    assert largest.numel <= chunk * (vocab + 1)


@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
def test_chunks_of_the_likeliest_tokens_compile():
    args = coarsen_target(draw_inputs(draft_ids=DRAFT_IDS, steps=(2,)))
    compiled = partial(
        chunked_distillation_loss, evaluate=torch.compile(evaluate_chunk, backend="aot_eager", fullgraph=True)
    )
    for name in ("lk_hybrid", "ce"):
        conf = LossConf(name=LossName[name], logits_chunk=16, top_k=2)
        assert_all_close(differentiate(compiled, args, conf), differentiate(chunked_distillation_loss, args, conf))
