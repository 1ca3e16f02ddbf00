"""Each way in which ratio tests lose the distribution is planted here and caught by the check.

The first three change the draws and leave the probabilities that the rule assumes for them: `outcome`, which finds no
error beyond rounding in `tests/infer/verify/test_verification.py`, finds theirs. The fourth is seen in
samples.
"""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from infer.verify.base import ScoredNodes
from infer.verify.greedy_and_coupled import CoupledRule
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.trees.growth import Proposal
from tests.support.reports.enumeration import Context, Tables, grow, likeliest, outcome, paths_of
from tests.support.reports.enumeration import without_replacement as drawn

EXACT = 1e-12
WORDS = 4
SAMPLES = 500_000  # total variation of honest ones: below 0.002
SHAPES = ([2], [1, 2], [2, 1])


def build_tables() -> Tables:
    return Tables(0, depth=2, words=WORDS)


def draw_resorted(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """Return honest draws, sorted by their probability under the draft."""
    return [(tuple(sorted(tokens, key=lambda token: -probs[token])), chance) for tokens, chance in drawn(probs, count)]


def draw_and_prune(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """Draw one token too many and leave out the least likely of them."""
    return [
        (tuple(token for token in tokens if token != min(tokens, key=lambda t: probs[t])), chance)
        for tokens, chance in drawn(probs, count + 1)
    ]


def draw_and_cut(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """Draw one token too many and leave out the last, whatever the tokens are."""
    return [(tokens[:-1], chance) for tokens, chance in drawn(probs, count + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("draw", [likeliest, draw_resorted, draw_and_prune])
def test_trees_that_were_not_drawn_as_the_rule_assumes_are_caught(draw, shape):
    wrong = outcome(RejectionRule(), build_tables(), grow(build_tables(), paths_of(shape), draw))
    assert wrong.distance > 0.02


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_correct_forms_pass(shape):
    paths = paths_of(shape)
    right = [
        grow(build_tables(), paths),
        grow(build_tables(), paths, draw_and_cut),
        # These are not drawn, or not by the draft's probabilities, so the rule must assume none.
        *(grow(build_tables(), paths, draw).deterministic() for draw in (likeliest, draw_resorted, draw_and_prune)),
    ]
    for trees in right:
        assert outcome(RejectionRule(), build_tables(), trees).error < EXACT


@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule()], ids=["rejection", "block"])
def test_a_chain_of_likeliest_tokens_is_no_draw(rule):
    trees = grow(build_tables(), paths_of([1, 1]), likeliest)
    assert outcome(rule, build_tables(), trees).distance > 0.02
    assert outcome(rule, build_tables(), trees.deterministic()).error < EXACT


def build_many_words() -> Tables:
    """Return tables of more words, of which enough are left when all children of a tree are rejected."""
    return Tables(1, depth=0, words=8)


def count_first_tokens(rule, *, shared: bool, children: int) -> Tensor:
    """Count how often each token is emitted first, with sampled drafts and residuals."""
    target, draft = build_many_words().target[()], build_many_words().draft[()]
    numbers = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, SAMPLES, len(target), generator=numbers, dtype=torch.float64)
    noise, other = -(-uniform.log()).log()
    parents = torch.full((SAMPLES, children), -1)
    behind = draft.log().expand(SAMPLES, children + 1, -1)
    proposal = Proposal(ids=(draft.log() + noise).topk(children).indices, parents=parents, child_log_probs=behind)
    scored = ScoredNodes(
        warped_logits=target.log().expand_as(behind),
        noise=(noise if shared else other)[:, None].expand_as(behind),
        uniforms=torch.rand(SAMPLES, children, generator=numbers, dtype=torch.float64),
    )
    return rule.accept(proposal, scored, 1).ids[:, 0].bincount(minlength=len(target))


@pytest.mark.parametrize(
    ("rule", "children"), [(RejectionRule(), 1), (RejectionRule(), 2), (BlockRule(), 1)], ids=["chain", "tree", "block"]
)
def test_noise_shared_by_draft_and_residual_is_caught(rule, children):
    expected = build_many_words().target[()] * SAMPLES
    wrong = count_first_tokens(rule, shared=True, children=children)
    assert chisquare(wrong, expected).pvalue < 1e-9
    assert measure_distance(wrong, expected) > 0.004
    right = count_first_tokens(rule, shared=False, children=children)
    assert chisquare(right, expected).pvalue > 1e-3
    assert measure_distance(right, expected) < 0.002


def test_a_walk_may_share_its_noise_with_the_draft():
    """A walk compares no probabilities: it emits the target's choice, whatever the draft proposed."""
    expected = build_many_words().target[()] * SAMPLES
    shared = count_first_tokens(CoupledRule(), shared=True, children=2)
    assert chisquare(shared, expected).pvalue > 1e-3


def measure_distance(counts: Tensor, expected: Tensor) -> float:
    return float((counts - expected).abs().sum()) / 2 / SAMPLES
