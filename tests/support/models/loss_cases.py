"""Settings, random rows of both models and comparisons that the tests of losses share."""

import pytest
import torch

from models.losses.chunked import build_target_distribution, chunked_distillation_loss
from models.losses.config import LossConf, LossName
from models.losses.distributions import draft_distribution
from models.losses.token_losses import score_tokens
from scripts.benchmarks.loss import distillation_loss

DRAFT_IDS = torch.tensor([0, 2, 3, 7, 8])
FORMS = {"plain": distillation_loss, "chunked": chunked_distillation_loss}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}

each_loss = pytest.mark.parametrize("name", LossName, ids=lambda name: name.value)
each_vocabulary = pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
each_steps = pytest.mark.parametrize("steps", [(), (3,)], ids=["flat", "steps"])


def build_conf(name, **changes):
    """Build settings that reach every branch in a vocabulary of 5."""
    return LossConf(**{"name": name, "beta": 0.3, "top_k": 2, "logits_chunk": 8} | changes)


def build_logits(*rows):
    return torch.tensor(rows).log()


def compute_scores(draft_logits, target_logits, conf, *, labels=None, draft_ids=None):
    """Compute the scores of tokens, by name."""
    target = build_target_distribution(lambda rows: rows, target_logits, labels, draft_ids, conf)
    draft = draft_distribution(draft_logits, target, temperature=conf.temperature)
    return score_tokens(draft, target, draft_ids, conf)


def define_loss(conf, *, draft, target, label, likely):
    """Return the loss over the last axis by its definition.

    `target` may sum to less than 1, where the draft has not every token; `label` is the draft's probability of
    the text's token; `likely` are the tokens in the order of the target, of which the last counts as another.
    """
    soft = target / target.sum()
    alpha = torch.minimum(draft, target).sum(-1)
    trust = torch.exp(-conf.lk_eta * alpha.detach())
    mixed = conf.beta * soft + (1 - conf.beta) * draft
    k = min(conf.top_k, len(likely) - 1)
    top, others = likely[:k], likely[k:]

    def kl(a, b):
        return (torch.xlogy(a, a) - a * b.log()).sum(-1)

    def bucketed(probs):
        return torch.cat([probs[..., top], probs[..., others].sum(-1, keepdim=True)], -1)

    return {
        LossName.soft_ce: lambda: -(soft * draft.log()).sum(-1),
        LossName.forward_kl: lambda: kl(soft, draft),
        LossName.reverse_kl: lambda: kl(draft, soft),
        LossName.jsd: lambda: conf.beta * kl(soft, mixed) + (1 - conf.beta) * kl(draft, mixed),
        LossName.tv: lambda: 1 - alpha,
        LossName.ce: lambda: -label.log(),
        LossName.lk_hybrid: lambda: trust * kl(soft, draft) + (1 - trust) * (1 - alpha),
        LossName.topk_kl: lambda: kl(bucketed(soft), bucketed(draft)),
    }[conf.name]()


def draw_inputs(*, tokens=23, steps=(), draft_ids=None, vocab=11, own_heads=False, spread=1.0):
    """Draw rows of both models, with heads, labels and weights (some of them 0)."""
    draw = torch.Generator().manual_seed(1)
    draft_vocab = vocab if draft_ids is None else len(draft_ids)
    heads = steps[0] if own_heads else 1

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    return {
        "draft_hidden": normal(*steps, tokens, 6).requires_grad_(),
        "target_hidden_or_topk": normal(tokens, 5),
        "draft_heads": [(spread * normal(draft_vocab, 6)).requires_grad_() for _ in range(heads)],
        "target_head": spread * normal(vocab, 5),
        "weight": torch.rand(*steps, tokens, generator=draw).sub(0.3).clamp_min(0),
        "labels": torch.randint(vocab, (tokens,), generator=draw),
        "kept_ids": draft_ids,
    }


def differentiate(form, args, conf):
    """Compute value, metrics and gradients of a loss."""
    total, metrics = form(**args, conf=conf)
    grads = torch.autograd.grad(3 * total, [args["draft_hidden"], *args["draft_heads"]])
    return [total, *metrics.values(), *grads]


def differentiate_both(args, conf):
    return differentiate(distillation_loss, args, conf), differentiate(chunked_distillation_loss, args, conf)


def assert_all_close(actual, expected, **tolerance):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or CLOSE))
