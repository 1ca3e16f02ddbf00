"""Enumerate every outcome of a round on models of a few tokens, each with its exact probability.

Target and draft are tables: a distribution after each context. All trees that can be drawn are the rows of a batch,
each with its probability. Coins are integrated: each way of accepting has a probability from the odds
of the verifier's own module, and is then replayed with coins and noise within a billionth of the
threshold, so that odds and residuals are those that `accept` acts on.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from infer.verify import rejection_and_block
from infer.verify.base import ScoredNodes
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.trees.growth import Proposal, ancestor_mask
from models.trees.tree import tree_from_paths

WORDS = 3
HAIR = 1e-9

Context = tuple[int, ...]
# (draft distribution, how many children) -> their tokens in order, and how likely those are
Draw = Callable[[Tensor, int], list[tuple[Context, float]]]


def paths_of(branching: list[int]) -> list[list[int]]:
    """List all rank paths of a tree with a number of children for each level."""
    levels = (itertools.product(*map(range, branching[:d])) for d in range(1, len(branching) + 1))
    return [list(path) for level in levels for path in level]


def parents_of(paths: list[list[int]]) -> list[int]:
    parents, offset = [], -1
    for depth, level in enumerate(tree_from_paths(paths).levels):
        parents += [above + offset if depth else -1 for above, _ in level]
        offset = len(parents) - len(level)
    return parents


class Tables:
    """Random distributions after every context; entries can be set to zero, as warping does."""

    def __init__(self, seed: int, depth: int, words: int = WORDS):
        numbers = torch.Generator().manual_seed(seed)
        self.words = words
        contexts = [c for d in range(depth + 1) for c in itertools.product(range(words), repeat=d)]
        self.target, self.draft = ({c: self._new(numbers) for c in contexts} for _ in range(2))

    def _new(self, numbers: torch.Generator) -> Tensor:
        weights = torch.rand(self.words, generator=numbers, dtype=torch.float64)
        return normalize(weights.log().abs() ** 1.5)  # uneven

    def without(self, name: str, zeros: Callable[[Context], list[int]]) -> "Tables":
        """Set the tokens `zeros(context)` of `target` or `draft` to zero; return the tables."""
        for context, probs in getattr(self, name).items():
            probs[zeros(context)] = 0.0
            probs /= probs.sum()
        return self


def normalize(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def without_replacement(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """List the draws in order; where no probability is left, the first tokens are taken."""
    if count == 0:
        return [((), 1.0)]
    draws = []
    for first, chance in enumerate(probs.tolist()):
        if chance > 0:
            rest = probs.clone()
            rest[first] = 0.0
            left = rest / rest.sum().clamp_min(1e-300)
            for others, likely in without_replacement(left, count - 1):
                draws.append(((first, *others), chance * likely))
    return draws or [(tuple(range(count)), 1.0)]


def likeliest(probs: Tensor, count: int) -> list[tuple[Context, float]]:
    """Return the likeliest tokens, which a deterministic tree lists without a draw."""
    return [(tuple(probs.argsort(descending=True, stable=True)[:count].tolist()), 1.0)]


@dataclass(kw_only=True)
class Trees:
    """All trees of a shape, a row each; `child_log_probs` of their proposal are the draft's."""

    proposal: Proposal
    chance: Tensor  # of each row
    contexts: list[list[Context]]  # of root and nodes of each row
    target: Tensor  # [rows, nodes + 1, words]

    def deterministic(self) -> "Trees":
        return replace(self, proposal=replace(self.proposal, child_log_probs=None))

    @property
    def depth(self) -> int:
        return max(map(len, self.contexts[0]))


def grow(tables: Tables, paths: list[list[int]], draw: Draw = without_replacement) -> Trees:
    """Build every tree that `draw` can return, with its probability."""
    parents = parents_of(paths)
    rows: list[tuple[dict[int, int], float]] = [({}, 1.0)]
    for parent in sorted(set(parents)):
        children = [node for node, above in enumerate(parents) if above == parent]
        grown = []
        for tokens, chance in rows:
            probs = tables.draft[build_context(parent, parents, tokens)]
            for drawn, likely in draw(probs, len(children)):
                grown.append((tokens | dict(zip(children, drawn, strict=True)), chance * likely))
        rows = grown
    ids = [[tokens[node] for node in range(len(parents))] for tokens, _ in rows]
    return trees_of(tables, parents, ids, [chance for _, chance in rows])


def build_context(node: int, parents: list[int], tokens: dict[int, int]) -> Context:
    return () if node < 0 else (*build_context(parents[node], parents, tokens), tokens[node])


def trees_of(tables: Tables, parents: list[int], ids: list[list[int]], chance: list[float]) -> Trees:
    nodes = range(-1, len(parents))
    contexts = [[build_context(n, parents, dict(enumerate(row))) for n in nodes] for row in ids]
    target, draft = (
        torch.stack([torch.stack([table[context] for context in row]) for row in contexts])
        for table in (tables.target, tables.draft)
    )
    proposal = Proposal(
        ids=torch.tensor(ids), parents=torch.tensor(parents).expand(len(ids), -1), child_log_probs=draft.log()
    )
    return Trees(proposal=proposal, contexts=contexts, target=target, chance=torch.tensor(chance, dtype=torch.float64))


@dataclass(kw_only=True)
class Judged:
    """The odds of every node, and where the path of each row ends with which residual."""

    odds: Tensor  # [rows, nodes]
    ends: Tensor  # [rows, nodes + 1], sums to 1
    left: Tensor  # [rows, nodes + 1, words], sums to 1


def judge(rule: RejectionRule | BlockRule, trees: Trees) -> Judged:
    return judge_chain(trees) if isinstance(rule, BlockRule) else judge_tree(trees)


def judge_tree(trees: Trees) -> Judged:
    """Compute the odds of each node, given that its parent was accepted and its earlier siblings were not."""
    proposal, rows = trees.proposal, len(trees.chance)
    left = list(trees.target.unbind(1))
    draft = list((proposal.child_log_probs if proposal.child_log_probs is not None else trees.target).exp().unbind(1))
    ends = [torch.ones(rows, dtype=torch.float64)]
    odds = []
    for node, parent in enumerate(proposal.parents[0].tolist()):
        token = proposal.ids[:, node]
        if proposal.child_log_probs is None:
            draft[parent + 1] = one_hot(token, left[0].shape[1]).double()
        chance, left[parent + 1], draft[parent + 1] = rejection_and_block.compute_residual(
            left[parent + 1], draft[parent + 1], token
        )
        odds.append(chance)
        ends.append(ends[parent + 1] * chance)
        ends[parent + 1] = ends[parent + 1] * (1 - chance)
    return Judged(odds=torch.stack(odds, 1), ends=torch.stack(ends, 1), left=torch.stack(left, 1))


def judge_chain(trees: Trees) -> Judged:
    """Compute the odds of each node, given that no later node ends the path."""
    ids, behind = trees.proposal.ids, trees.proposal.child_log_probs
    drawn = one_hot(ids, trees.target.shape[-1]).double()
    draft = drawn if behind is None else behind[:, :-1].exp()
    odds, left = rejection_and_block.compute_block_residual(trees.target, draft, ids)
    ends, open_ = [], torch.ones(len(ids), dtype=torch.float64)
    for chance in reversed(odds.unbind(1)):
        ends.insert(0, open_ * chance)
        open_ = open_ * (1 - chance)
    return Judged(odds=odds, ends=torch.stack([open_, *ends], 1), left=left / left.sum(-1, keepdim=True))


def replays_as_judged(rule: RejectionRule | BlockRule, trees: Trees, judged: Judged) -> bool:
    """Return whether `accept`, just beside each threshold, decides as the odds and residuals say."""
    rows, nodes = judged.odds.shape
    above = ancestor_mask(trees.proposal.parents)[0]
    yes = judged.odds * (1 - HAIR)
    no = judged.odds + (1 - judged.odds) * HAIR
    for end, word in itertools.product(range(nodes + 1), range(trees.target.shape[-1])):
        accepts = [above[end, 1:]]
        if isinstance(rule, BlockRule):  # what is short of the end does not matter
            accepts.append(torch.arange(1, nodes + 1) == end)
        # noise that gives all tokens of the residual the same score, and this token a slightly better score
        level = torch.where(judged.left[:, end] > 0, -judged.left[:, end].log(), 0.0)
        noise = torch.randn(rows, nodes + 1, level.shape[-1], dtype=torch.float64)
        noise[:, end] = level + HAIR * one_hot(torch.tensor(word), level.shape[-1])
        text = torch.tensor([[*row[end], word] for row in trees.contexts])
        possible = torch.minimum(judged.ends[:, end], judged.left[:, end, word]) > HAIR
        for taken in accepts:
            coins = torch.where(taken, yes, no)
            scored = ScoredNodes(warped_logits=trees.target.log(), noise=noise, uniforms=coins)
            accepted = rule.accept(trees.proposal, scored, trees.depth)
            right = (accepted.count == text.shape[1]) & (accepted.nodes[:, -1] == end)
            right &= (accepted.ids[:, : text.shape[1]] == text).all(1)
            if not (right | ~possible).all():
                return False
    return True


@dataclass(kw_only=True)
class Outcome:
    error: float  # largest error of a probability
    distance: float  # total variation
    tau: float  # mean tokens a round


def outcome(rule: RejectionRule | BlockRule, tables: Tables, trees: Trees) -> Outcome:
    """Compare the emitted texts, completed by the target to equal lengths, with the target alone."""
    likely = _likely(rule, trees) * trees.chance[:, None, None]
    return _compare(tables, trees.contexts, likely)


def outcome_of_each(rule: RejectionRule | BlockRule, tables: Tables, trees: Trees) -> list[Outcome]:
    """Compare the emitted texts of each tree by itself, as if no other could have been proposed."""
    return [
        _compare(tables, [contexts], likely[None])
        for contexts, likely in zip(trees.contexts, _likely(rule, trees), strict=True)
    ]


def _likely(rule: RejectionRule | BlockRule, trees: Trees) -> Tensor:
    """Return how likely each tree ends at which node with which word: [rows, nodes + 1, words]."""
    judged = judge(rule, trees)
    assert replays_as_judged(rule, trees, judged)
    return judged.ends[..., None] * judged.left


def _compare(tables: Tables, contexts: list[list[Context]], likely: Tensor) -> Outcome:
    emitted: dict[Context, float] = {}
    for row, chances in zip(contexts, likely.tolist(), strict=True):
        for context, words in zip(row, chances, strict=True):
            for word, chance in enumerate(words):
                emitted[*context, word] = emitted.get((*context, word), 0.0) + chance
    length = max(map(len, emitted))
    errors = []
    for text in itertools.product(range(tables.words), repeat=length):
        starts = [text[: n + 1] for n in range(length)]
        total = sum(emitted.get(start, 0.0) * compute_chance(tables, text, len(start)) for start in starts)
        errors.append(total - compute_chance(tables, text, 0))
    return Outcome(
        error=max(map(abs, errors)),
        distance=sum(map(abs, errors)) / 2,
        tau=sum(len(start) * chance for start, chance in emitted.items()),
    )


def compute_chance(tables: Tables, text: Context, start: int) -> float:
    """Return the probability that the target continues `text[:start]` as `text` does."""
    return math.prod(float(tables.target[text[:n]][text[n]]) for n in range(start, len(text)))
