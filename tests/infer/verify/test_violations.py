"""The ways in which ratio tests lose the distribution, each planted and caught by the check.

The first three change what is drawn and leave what is believed of it: `outcome`, which finds no
error beyond rounding in `tests/infer/verify/test_verification.py`, finds theirs. The fourth is seen in
samples.
"""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from infer.verify.base import ScoredTree
from infer.verify.greedy_and_coupled import CoupledRule
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.trees.growth import Proposal
from tests.support.reports.enumeration import Context, Tables, grow, likeliest, outcome, paths_of
from tests.support.reports.enumeration import without_replacement as drawn

EXACT = 1e-12
WORDS = 4
SAMPLES = 500_000  # total variation of honest ones: below 0.002
SHAPES = ([2], [1, 2], [2, 1])


def tables() -> Tables:
    return Tables(0, depth=2, words=WORDS)


def resorted(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """Honest draws, listed by how likely the draft finds them."""
    return [(tuple(sorted(tokens, key=lambda token: -probs[token])), chance) for tokens, chance in drawn(probs, count)]


def pruned(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """One draw too many: the least likely of the tokens that came is left out."""
    return [
        (tuple(token for token in tokens if token != min(tokens, key=lambda t: probs[t])), chance)
        for tokens, chance in drawn(probs, count + 1)
    ]


def first_kept(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """One draw too many, and the last is left out: what came had no say in it."""
    return [(tokens[:-1], chance) for tokens, chance in drawn(probs, count + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("draw", [likeliest, resorted, pruned])
def test_trees_that_were_not_drawn_as_believed_are_caught(draw, shape):
    wrong = outcome(RejectionRule(), tables(), grow(tables(), paths_of(shape), draw))
    assert wrong.distance > 0.02


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_correct_forms_pass(shape):
    paths = paths_of(shape)
    right = [
        grow(tables(), paths),
        grow(tables(), paths, first_kept),
        # not drawn, or not as the draft says: then believe nothing of it
        *(grow(tables(), paths, draw).deterministic() for draw in (likeliest, resorted, pruned)),
    ]
    for trees in right:
        assert outcome(RejectionRule(), tables(), trees).error < EXACT


@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule()], ids=["rejection", "block"])
def test_a_chain_of_likeliest_tokens_is_no_draw(rule):
    trees = grow(tables(), paths_of([1, 1]), likeliest)
    assert outcome(rule, tables(), trees).distance > 0.02
    assert outcome(rule, tables(), trees.deterministic()).error < EXACT


def many() -> Tables:
    """More words, of which enough are left when all children of a tree are rejected."""
    return Tables(1, depth=0, words=8)


def sampled(rule, *, shared: bool, children: int) -> Tensor:
    """How often each token is emitted first, of drafts and residuals that are sampled."""
    target, draft = many().target[()], many().draft[()]
    numbers = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, SAMPLES, len(target), generator=numbers, dtype=torch.float64)
    noise, other = -(-uniform.log()).log()
    parents = torch.full((SAMPLES, children), -1)
    behind = draft.log().expand(SAMPLES, children + 1, -1)
    proposal = Proposal(ids=(draft.log() + noise).topk(children).indices, parents=parents, child_log_probs=behind)
    scored = ScoredTree(
        proposal=proposal,
        warped_logits=target.log().expand_as(behind),
        noise=(noise if shared else other)[:, None].expand_as(behind),
        uniforms=torch.rand(SAMPLES, children, generator=numbers, dtype=torch.float64),
    )
    return rule.accept(scored, 1).ids[:, 0].bincount(minlength=len(target))


@pytest.mark.parametrize(
    ("rule", "children"), [(RejectionRule(), 1), (RejectionRule(), 2), (BlockRule(), 1)], ids=["chain", "tree", "block"]
)
def test_noise_shared_by_draft_and_residual_is_caught(rule, children):
    expected = many().target[()] * SAMPLES
    wrong = sampled(rule, shared=True, children=children)
    assert chisquare(wrong, expected).pvalue < 1e-9
    assert distance(wrong, expected) > 0.004
    right = sampled(rule, shared=False, children=children)
    assert chisquare(right, expected).pvalue > 1e-3
    assert distance(right, expected) < 0.002


def test_a_walk_may_share_its_noise_with_the_draft():
    """It compares no odds: what is emitted is the target's choice, whatever the draft knew."""
    expected = many().target[()] * SAMPLES
    shared = sampled(CoupledRule(), shared=True, children=2)
    assert chisquare(shared, expected).pvalue > 1e-3


def distance(counts: Tensor, expected: Tensor) -> float:
    return float((counts - expected).abs().sum()) / 2 / SAMPLES
