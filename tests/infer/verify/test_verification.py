"""Lossless verifiers are proven lossless by listing every possible outcome, in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from infer.engine.decode import build_acceptance_rule
from infer.verify.base import ScoredNodes
from infer.verify.config import Verification
from infer.verify.greedy_and_coupled import CoupledRule, GreedyRule, TypicalRule
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.io.errors import UserError
from models.trees.config import TreeConf
from models.trees.growth import Proposal
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind, tree_from_paths
from tests.support.reports.enumeration import (
    WORDS,
    Tables,
    Trees,
    compute_chance,
    grow,
    likeliest,
    outcome,
    outcome_of_each,
    parents_of,
    paths_of,
    trees_of,
)

EXACT = 1e-12
CHAINS = {str(shape): paths_of(shape) for shape in ([1], [1, 1], [1, 1, 1])}
TREES = CHAINS | {str(shape): paths_of(shape) for shape in ([2], [2, 1], [1, 2], [2, 2], [3, 2])}
TREES["ragged"] = [[0], [1], [2], [1, 0], [1, 1], [2, 0], [1, 1, 0]]
TREES["lopsided"] = [[0], [1], [0, 0], [0, 0, 0], [0, 0, 1]]
RATIO = [(RejectionRule(), name) for name in TREES] + [(BlockRule(), name) for name in CHAINS]
ratio = pytest.mark.parametrize(("rule", "shape"), RATIO, ids=[f"{rule.name}-{shape}" for rule, shape in RATIO])
WARM, COLD = SamplingConf(temperature=1.0), SamplingConf()


def build_tables(seed: int = 0) -> Tables:
    return Tables(seed, depth=4)


def list_every_tree(tables: Tables, paths: list[list[int]]) -> Trees:
    """Return all trees with distinct siblings, whatever their probability under the draft."""
    parents = parents_of(paths)
    ids = [
        list(row)
        for row in itertools.product(range(WORDS), repeat=len(parents))
        if len(set(zip(parents, row, strict=True))) == len(parents)
    ]
    return trees_of(tables, parents, ids, [1.0] * len(ids)).deterministic()


@ratio
@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_trees_leave_the_targets_distribution(rule, shape, seed):
    trees = grow(build_tables(seed), TREES[shape])
    assert float(trees.chance.sum()) == pytest.approx(1.0)
    assert outcome(rule, build_tables(seed), trees).error < EXACT


@ratio
def test_tokens_that_warping_or_a_reduced_vocabulary_cuts_away_change_nothing(rule, shape):
    cuts = {
        "target": lambda context: [len(context) % WORDS],  # top-k of the target
        "draft": lambda context: [0],  # no token of the draft's vocabulary
        "both": lambda context: [sum(context) % WORDS],
    }
    for name, cut in cuts.items():
        cut_tables = build_tables()
        for table in ("target", "draft") if name == "both" else (name,):
            cut_tables.without(table, cut)
        assert outcome(rule, cut_tables, grow(cut_tables, TREES[shape])).error < EXACT


@ratio
def test_a_draft_that_runs_out_of_tokens_changes_nothing(rule, shape):
    """When one token has all the probability, further children are placeholders and are refused."""
    sure = build_tables().without("draft", lambda context: [0, 2] if len(context) % 2 else [1, 2])
    assert outcome(rule, sure, grow(sure, TREES[shape])).error < EXACT


@ratio
def test_a_draft_that_is_the_target_is_accepted_completely(rule, shape):
    same = build_tables()
    same.draft = same.target
    trees = grow(same, TREES[shape])
    result = outcome(rule, same, trees)
    assert result.error < EXACT
    if shape in CHAINS:
        assert result.tau == pytest.approx(trees.depth + 1)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *((RejectionRule(), name) for name in ("[2]", "[2, 1]", "[1, 2]", "lopsided")),
        *((rule, name) for rule in (RejectionRule(), BlockRule()) for name in CHAINS),
    ],
)
def test_each_deterministic_tree_alone_is_lossless(rule, shape):
    """Nothing is averaged over trees, so the tree may be chosen in any way by the prefix."""
    alone = outcome_of_each(rule, build_tables(), list_every_tree(build_tables(), TREES[shape]))
    assert max(result.error for result in alone) < EXACT


@pytest.mark.parametrize("shape", TREES)
def test_rejection_accepts_the_most_that_any_rule_can_of_deterministic_trees(shape):
    """A child is accepted as often as the target emits it, and no rule can accept more."""
    trees = grow(build_tables(), TREES[shape], likeliest).deterministic()
    result = outcome(RejectionRule(), build_tables(), trees)
    best = sum(compute_chance(build_tables(), context, 0) for context in trees.contexts[0])
    assert result.error < EXACT
    assert result.tau == pytest.approx(best)


def test_a_copied_chain_that_repeats_a_node_changes_nothing():
    """As `graft_chain` hangs it, node 3 repeats the token of node 1, and node 4 goes on from node 1."""
    parents, ids = [-1, -1, 0, -1, 1, 4], [0, 2, 1, 2, 0, 0]
    trees = trees_of(build_tables(), parents, [ids], [1.0]).deterministic()
    assert outcome(RejectionRule(), build_tables(), trees).error < EXACT


@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "deterministic"])
def test_block_verification_accepts_no_less_than_token_by_token_rejection(shape, drawn):
    gains = []
    for seed in range(8):
        trees = grow(build_tables(seed), TREES[shape])
        if not drawn:
            trees = trees.deterministic()
        gain = outcome(BlockRule(), build_tables(seed), trees).tau
        gain -= outcome(RejectionRule(), build_tables(seed), trees).tau
        gains.append(gain)
    assert min(gains) > -EXACT
    # A single token is no block, and a deterministic draft allows no gain.
    assert (max(gains) > 0.005) == (drawn and shape != "[1]")


def list_texts(tables: Tables, length: int):
    """List every text that the target can emit, with its probability."""
    for text in itertools.product(range(WORDS), repeat=length):
        yield text, compute_chance(tables, text, 0)


@pytest.mark.parametrize("shape", ["[1]", "[1, 1]", "[2]", "[2, 1]", "[1, 2]", "lopsided"])
def test_walks_emit_the_targets_choice_whatever_the_tree(shape):
    """The emitted distribution is the choice's own, even if the tree was picked by somebody who knew the choice."""
    trees = list_every_tree(build_tables(), TREES[shape])
    numbers = torch.Generator().manual_seed(0)
    total = 0.0
    for text, chance in list_texts(build_tables(), trees.depth + 1):
        # Noise that outweighs all logits picks the text on its own path, and any token elsewhere.
        picked = torch.randint(WORDS, trees.target.shape[:2], generator=numbers)
        for row, contexts in enumerate(trees.contexts):
            for node, context in enumerate(contexts):
                if text[: len(context)] == context:
                    picked[row, node] = text[len(context)]
        noise = 1e6 * torch.nn.functional.one_hot(picked, WORDS).double()
        scored = ScoredNodes(warped_logits=trees.target.log(), noise=noise)
        accepted = CoupledRule().accept(trees.proposal, scored, trees.depth)
        longest = [max(len(c) for c in row if text[: len(c)] == c) for row in trees.contexts]
        assert accepted.count.tolist() == [length + 1 for length in longest]
        for row, length in enumerate(longest):
            assert tuple(accepted.ids[row, : length + 1].tolist()) == text[: length + 1]
        alone = GreedyRule().accept(trees.proposal, replace(scored, warped_logits=noise, noise=None), trees.depth)
        assert torch.equal(alone.ids, accepted.ids)
        total += chance
    assert total == pytest.approx(1.0)


def test_the_lowest_id_of_equal_logits_is_chosen():
    tree = Proposal(ids=torch.tensor([[1, 0]]), parents=torch.tensor([[-1, -1]]))
    accepted = GreedyRule().accept(tree, ScoredNodes(warped_logits=torch.zeros(1, 3, 4)), 1)
    assert accepted.nodes.tolist() == [[0, 2]]


def build_random_trees(rows: int = 4000, words: int = 50, *, drawn: bool = True) -> tuple[Proposal, ScoredNodes]:
    """Return random trees in fp32 with peaked distributions, whose rounding must not yield NaN."""
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    parents = torch.tensor(parents_of(paths)).expand(rows, -1)
    logits = 30 * torch.rand(rows, 1, 1) * torch.randn(rows, len(paths) + 1, words)
    logits[torch.rand_like(logits) < 0.5] = -math.inf
    logits[..., 0] = 0.0
    behind = logits.clone()
    behind[rows // 2 :] = 30 * torch.randn_like(behind[rows // 2 :])
    ids = torch.stack([(behind + torch.randn_like(behind)).argmax(-1)[:, p + 1] for p in parents[0]])
    behind = behind.log_softmax(-1) if drawn else None
    return Proposal(ids=ids.T.contiguous(), parents=parents, child_log_probs=behind), ScoredNodes(
        warped_logits=logits,
        noise=-torch.empty_like(logits).exponential_().log(),
        uniforms=torch.rand(rows, len(paths)),
    )


def hang_as_chain(proposal: Proposal) -> Proposal:
    return replace(proposal, parents=torch.arange(-1, proposal.ids.shape[1] - 1).expand_as(proposal.ids))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule()], ids=["rejection", "block"])
def test_only_tokens_that_the_target_may_emit_are_emitted_in_fp32_too(rule, drawn):
    proposal, scored = build_random_trees(drawn=drawn)
    if isinstance(rule, BlockRule):
        proposal = hang_as_chain(proposal)
    depth = 7 if isinstance(rule, BlockRule) else 3
    accepted = rule.accept(proposal, scored, depth)
    logp = scored.warped_logits.gather(1, accepted.nodes[..., None].expand(-1, -1, 50))
    emitted_logits = logp.gather(2, accepted.ids[..., None])[..., 0]
    emitted = torch.arange(depth + 1) < accepted.count[:, None]
    assert (emitted_logits[emitted] > -math.inf).all()
    assert set(accepted.count.tolist()) >= {1, 2, 3}


RULES = [GreedyRule(), CoupledRule(), RejectionRule(), BlockRule(), TypicalRule()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])


def build_scored_tree(rule, *, drawn: bool = True) -> tuple[Proposal, ScoredNodes]:
    proposal, scored = build_random_trees(64, drawn=drawn)
    if isinstance(rule, GreedyRule):
        scored.noise = None
    return hang_as_chain(proposal) if isinstance(rule, BlockRule) else proposal, scored


@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@every_rule
@pytest.mark.parametrize("drawn", [True, False])
def test_every_rule_compiles_to_one_graph(rule, drawn):
    proposal, scored = build_scored_tree(rule, drawn=drawn)
    traced = torch.compile(rule.accept, backend="aot_eager", fullgraph=True, dynamic=False)
    eager, graph = rule.accept(proposal, scored, 7), traced(proposal, scored, 7)
    for name in ("ids", "nodes", "count"):
        assert torch.equal(getattr(eager, name), getattr(graph, name))


def build_tree(kind: str, **conf) -> Tree:
    shapes = {"chain": {"depth": 2}, "static": {"paths": [[0], [1], [0, 0]]}, "dynamic": {"depth": 2, "nodes": 4}}
    return TreeConf(kind=TreeKind(kind), **shapes[kind], **conf).build()


ALL = {
    f"{kind}{copied or ''}": build_tree(kind, ngram_tokens=copied)
    for kind in ("chain", "static", "dynamic")
    for copied in (0, 3)
}
PROVEN = {
    GreedyRule(): set(ALL),
    CoupledRule(): set(ALL),
    RejectionRule(): {"chain", "static", "dynamic", "dynamic3"},
    BlockRule(): {"chain"},
    TypicalRule(): set(ALL),  # refused nowhere: it has no proof to lose
}


@pytest.mark.parametrize("rule", PROVEN, ids=lambda rule: rule.name)
def test_a_tree_without_a_proof_is_refused_by_name(rule):
    fits, other = (COLD, WARM) if isinstance(rule, GreedyRule) else (WARM, COLD)
    for name, tree in ALL.items():
        if name in PROVEN[rule]:
            rule.check(fits, tree)
        else:
            with pytest.raises(UserError, match=rf"^evaluation\.verification: {rule.name} needs "):
                rule.check(fits, tree)
    with pytest.raises(UserError, match=rf"{rule.name} needs evaluation\.sampling\.temperature"):
        rule.check(other)


def test_rejection_needs_every_draw_of_a_node():
    gap = tree_from_paths([[0], [1], [1, 0], [1, 2]])
    with pytest.raises(UserError, match=r"siblings of ranks \[0, 2\]; add the missing ones"):
        RejectionRule().check(WARM, gap)
    CoupledRule().check(WARM, gap)


def test_auto_is_greedy_or_coupled():
    assert build_acceptance_rule(Verification.auto, COLD) == GreedyRule()
    assert build_acceptance_rule(Verification.auto, WARM) == CoupledRule()
    for verification in list(Verification)[2:]:
        rule = build_acceptance_rule(verification, WARM)
        assert rule.name == verification.value
    assert build_acceptance_rule(Verification.typical, WARM, typical=TypicalRule(delta=0.5)).delta == 0.5
