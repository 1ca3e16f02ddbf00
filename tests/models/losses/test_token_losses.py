"""Every loss equals its definition: a float64 reference, examples by hand, and identities."""

import math
from dataclasses import replace

import pytest
import torch

from models.io.errors import UserError
from models.losses.config import LossConf, LossName
from tests.support.models.loss_cases import (
    CLOSE,
    FORMS,
    assert_all_close,
    build_conf,
    build_logits,
    compute_scores,
    define_loss,
    differentiate,
    draw_inputs,
    each_loss,
    each_vocabulary,
)

LARGE = 151_936

# --- the reference: definitions in float64, gradients by autograd ------------------------------


def compute_reference(args, conf):
    """Compute value and gradients row by row."""
    vocab = len(args["target_head"])
    draft_ids = torch.arange(vocab) if args["kept_ids"] is None else args["kept_ids"]
    hidden = args["draft_hidden"].detach().double().requires_grad_()
    heads = [head.detach().double().requires_grad_() for head in args["draft_heads"]]
    logits = args["target_hidden_or_topk"].double() @ args["target_head"].double().T
    total = torch.zeros((), dtype=torch.float64)
    steps = args["weight"].reshape(-1, len(logits))
    for step, weights in enumerate(steps):
        head = heads[step] if len(heads) > 1 else heads[0]
        rows = hidden.reshape(len(steps), len(logits), -1)[step]
        for t, weight in enumerate(weights):
            must = args["labels"][t] if conf.name is LossName.ce else logits[t].argmax()
            if weight and must in draft_ids:
                target = (logits[t] / conf.temperature).softmax(-1)[draft_ids]
                draft = (head @ rows[t] / conf.temperature).softmax(-1)
                label = (draft_ids == must).nonzero()[0, 0]
                likely = target.argsort(descending=True)
                loss = define_loss(conf, draft=draft, target=target, label=draft[label], likely=likely)
                total = total + weight.double() * loss
    grads = torch.autograd.grad(3 * total, [hidden, *heads])
    return [tensor.float() for tensor in (total, *grads)]


@each_loss
@each_vocabulary
@pytest.mark.parametrize("own_heads", [False, True], ids=["shared-head", "own-heads"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_both_forms_equal_the_definition(name, draft_ids, own_heads, temperature, masked):
    args = draw_inputs(tokens=9, steps=(2,), draft_ids=draft_ids, own_heads=own_heads)
    args["weight"] = args["weight"] * (torch.arange(9) % 3 > 0) if masked else args["weight"] + 0.1
    conf = build_conf(name, temperature=temperature)
    expected = compute_reference(args, conf)
    for form in FORMS.values():
        total, *rest = differentiate(form, args, conf)
        assert_all_close([total, *rest[-len(expected) + 1 :]], expected)


def avoid_kinks(args):
    """Redraw the draft's head where a row gives a token the target's probability, to 1e-4.

    Total variation has a kink there: rounding of the logits, a few 1e-6, would choose the side, and
    with it the token's entire gradient. Of 600,000 random pairs some dozens lie so close.
    """
    head, draft_ids = args["draft_heads"][0].detach(), args["kept_ids"]
    draw = torch.Generator().manual_seed(2)
    theirs = args["target_hidden_or_topk"].double() @ args["target_head"].double().T
    theirs = theirs.log_softmax(-1)
    theirs = theirs if draft_ids is None else theirs[:, draft_ids]
    while True:
        ours = (args["draft_hidden"].detach().double() @ head.double().T).log_softmax(-1)
        close = ((ours - theirs).abs() < 1e-4).any(0)
        if not close.any():
            break
        head[close] = 0.4 * torch.randn(int(close.sum()), head.shape[1], generator=draw)
    return args | {"draft_heads": [head.requires_grad_()]}


@each_loss
@pytest.mark.parametrize("size", [None, 32_000], ids=["full", "reduced"])
@pytest.mark.parametrize("form", FORMS)
def test_a_vocabulary_of_152_thousand_costs_no_precision(name, size, form):
    """At an ordinary spread of logits, only the rounding of sums over the vocabulary adds errors.

    A sum of n terms in fp32 whose partial sums stay below its result is rounded n times by at most
    u = 2**-24 of it. The errors have either sign and add up as a random walk, to sqrt(n) * u at
    most. Softmax sums over the full vocabulary, even for a reduced draft vocabulary: n is 152 thousand.
    """
    draft_ids = None if size is None else torch.arange(LARGE)[:: LARGE // size][:size]
    args = draw_inputs(tokens=5, vocab=LARGE, draft_ids=draft_ids, spread=0.4)
    args["weight"] = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0])
    if draft_ids is not None:  # likelier tokens, so that rows are covered
        args["target_head"][draft_ids] *= 3
        args["labels"] = draft_ids[args["labels"] % size]
    args = avoid_kinks(args)
    conf = build_conf(name, top_k=8_000, logits_chunk=2)
    total, *_, hidden_grad, head_grad = differentiate(FORMS[form], args, conf)
    expected = compute_reference(args, conf)
    torch.testing.assert_close(total, expected[0], **CLOSE)
    for actual, grad in ((hidden_grad, expected[1]), (head_grad, expected[2])):
        assert (actual - grad).norm() < math.sqrt(LARGE) * 2**-24 * grad.norm()


@each_loss
@each_vocabulary
def test_sharp_distributions_neither_underflow_nor_overflow(name, draft_ids):
    """Logits lie hundreds apart: most probabilities are 0 in fp32, but their logarithms are finite."""
    args = draw_inputs(tokens=9, draft_ids=draft_ids)
    args["target_head"], args["weight"] = 15 * args["target_head"], args["weight"] + 0.1
    args["draft_heads"] = [(12 * head.detach()).requires_grad_() for head in args["draft_heads"]]
    expected = compute_reference(args, build_conf(name))
    for form in FORMS.values():
        total, *rest = differentiate(form, args, build_conf(name))
        assert_all_close([total, *rest[-2:]], expected, atol=1e-3, rtol=1e-4)


# --- by hand and by identity ------------------------------------------------------------------


def test_a_reduced_vocabulary_by_hand():
    """The teacher is renormalised to (1/3, 2/3); alpha is not: min(.2, .5) + min(.4, .5) = .6."""
    draft_ids = torch.tensor([0, 2])
    target = build_logits([0.2, 0.3, 0.4, 0.1], [0.2, 0.5, 0.2, 0.1])
    scores = compute_scores(
        build_logits([0.5, 0.5], [0.25, 0.75]), target, LossConf(name=LossName.soft_ce), draft_ids=draft_ids
    )
    torch.testing.assert_close(scores["alpha"], torch.tensor([0.6, 0.4]))
    assert scores["covered"].tolist() == [True, False]
    assert scores["hit"].tolist() == [False, False]  # a tie goes to the first; token 1 is not in the draft vocabulary
    torch.testing.assert_close(scores["loss"], torch.tensor([math.log(2), 0.0]))


def test_topk_kl_teaches_a_draft_that_is_sure_of_the_wrong_token():
    """The draft's other probabilities underflow in fp32; their gradients still differ, and raise them."""
    draft, target = torch.tensor([[0.0, -200.0, -201.0]]), torch.tensor([[0.4, 0.3, 0.3]]).log()
    head, conf = draft.T.contiguous().requires_grad_(), build_conf(LossName.topk_kl, top_k=1)
    rest = torch.tensor([0.0, -1.0]).softmax(-1)
    expected = 0.4 * math.log(0.4) + 0.6 * (math.log(0.6) + 200 - math.log1p(math.exp(-1)))
    for form in FORMS.values():
        total, _ = form(
            torch.ones(1, 1),
            target,
            draft_heads=[head],
            target_head=torch.eye(3),
            weight=torch.ones(1),
            labels=None,
            kept_ids=None,
            conf=conf,
        )
        (grad,) = torch.autograd.grad(total, head)
        torch.testing.assert_close(total.detach(), torch.tensor(expected))
        torch.testing.assert_close(grad[:, 0], torch.cat([torch.tensor([0.6]), -0.6 * rest]))


@each_loss
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_perfect_draft_has_nothing_to_learn(name, temperature):
    """Every loss but the cross entropies is 0; every gradient but that of the text's token is 0."""
    logits, labels = torch.randn(50, 9).requires_grad_(), torch.arange(50) % 9
    scores = compute_scores(logits, logits.detach(), build_conf(name, temperature=temperature), labels=labels)
    (grad,) = torch.autograd.grad(scores["loss"].sum(), logits)
    nothing = torch.zeros_like(scores["loss"])
    if name not in (LossName.soft_ce, LossName.ce):
        torch.testing.assert_close(scores["loss"], nothing, atol=1e-6, rtol=0)
    if name is LossName.soft_ce:
        soft = (logits / temperature).softmax(-1)
        torch.testing.assert_close(scores["loss"], torch.special.entr(soft).sum(-1))
    if name not in (LossName.tv, LossName.lk_hybrid, LossName.ce):  # those have a kink there
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-6, rtol=0)
    assert scores["hit"].all()


@each_vocabulary
@pytest.mark.parametrize(("beta", "name"), [(0.0, LossName.forward_kl), (1.0, LossName.reverse_kl)])
def test_jsd_ends_in_the_kls(beta, name, draft_ids):
    """JSD equals them at the ends, and is a multiple of them nearby, as in GKD."""
    args = draw_inputs(draft_ids=draft_ids, steps=(2,), spread=0.5)
    for form in FORMS.values():
        end = differentiate(form, args, build_conf(name))
        assert_all_close(differentiate(form, args, build_conf(LossName.jsd, beta=beta)), end)
        near = abs(beta - 1e-3)
        total, *rest = differentiate(form, args, build_conf(LossName.jsd, beta=near))
        torch.testing.assert_close(total / 1e-3, end[0], rtol=2e-2, atol=0)
        assert torch.cosine_similarity(rest[-1].flatten(), end[-1].flatten(), dim=0) > 0.99


@each_loss
def test_only_cross_entropy_with_the_text_reads_labels(name):
    args = draw_inputs() | {"labels": None}
    for form in FORMS.values():
        if name is LossName.ce:
            with pytest.raises(AssertionError, match="labels"):
                form(**args, conf=build_conf(name))
        else:
            assert_all_close(
                differentiate(form, args, build_conf(name)), differentiate(form, draw_inputs(), build_conf(name))
            )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logits_chunk", 0),
        ("step_decay", 1.5),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("beta", 1.1),
        ("beta", -0.1),
        ("top_k", 0),
        ("lk_eta", -1.0),
    ],
)
def test_bad_settings_are_refused(key, value):
    with pytest.raises(UserError, match=rf"loss\.{key}: .*, got {value}; "):
        replace(LossConf(), **{key: value})
