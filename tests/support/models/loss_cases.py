"""What the tests of losses share: settings, random rows of both models, and comparisons."""

import pytest
import torch

from models.losses.chunked import build_target_distribution, chunked_distillation_loss
from models.losses.config import LossConf, LossName
from models.losses.distributions import draft_distribution
from models.losses.token_losses import score_tokens
from scripts.benchmarks.loss import distillation_loss

KEPT = torch.tensor([0, 2, 3, 7, 8])
FORMS = {"plain": distillation_loss, "chunked": chunked_distillation_loss}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}

each_loss = pytest.mark.parametrize("name", LossName, ids=lambda name: name.value)
each_vocabulary = pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
each_steps = pytest.mark.parametrize("steps", [(), (3,)], ids=["flat", "steps"])


def conf_of(name, **changes):
    """Settings that reach every branch in a vocabulary of 5."""
    return LossConf(**{"name": name, "beta": 0.3, "top_k": 2, "logits_chunk": 8} | changes)


def logits_of(*rows):
    return torch.tensor(rows).log()


def losses_of(draft_logits, target_logits, conf, *, labels=None, kept=None):
    """The scores of tokens by name."""
    target = build_target_distribution(lambda rows: rows, target_logits, labels, kept, conf)
    draft = draft_distribution(draft_logits, target, temperature=conf.temperature)
    return score_tokens(draft, target, kept, conf)


def inputs(*, tokens=23, steps=(), kept=None, vocab=11, own_heads=False, spread=1.0):
    """Random rows of both models, with heads, labels and weights (some 0)."""
    draw = torch.Generator().manual_seed(1)
    draft_vocab = vocab if kept is None else len(kept)
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
        "kept_ids": kept,
    }


def learned(form, args, conf):
    """Value, metrics and gradients."""
    total, metrics = form(**args, conf=conf)
    grads = torch.autograd.grad(3 * total, [args["draft_hidden"], *args["draft_heads"]])
    return [total, *metrics.values(), *grads]


def both(args, conf):
    return learned(distillation_loss, args, conf), learned(chunked_distillation_loss, args, conf)


def all_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or CLOSE))
