"""What one round computes, as functions of tensors with fixed shapes: each is one compiled graph.

    fused      one graph:  score the tree, accept a path, tell the draft, take its next proposal
    unfused    four:       score | accept | move | draft: the plain reference, and what can be timed

The fused round leaves what it accepted where the tree stood; the next pass moves it, layer by layer
(models/target/cache.py). The unfused round moves it at once. Both emit the same tokens.

Functions take everything that they touch as arguments, so decoders of one shape share their graphs.

Axes: B rows, P padded prompt, N nodes, D deepest node, S slots, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.verify import Scored, Verifier
from models.drafts.base import Draft, State
from models.speculate.sampling import History, Sampler, SamplingRule, gumbel, uniform
from models.speculate.tree import Proposal, Tree, ancestors, depths
from models.target.cache import StaticCache, Write, prompt_mask, tree_mask
from models.target.language_model import Seen, Transformer

# What chance is for; each has a seed of its own. Ratio tests are exact only where draft, coins and
# residual share no noise (docs/exactness.md).
TARGET, DRAFT, COINS, RESIDUAL = range(4)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same in all rounds of a decoder."""

    rule: SamplingRule
    verifier: Verifier
    tree: Tree
    vocab: int  # tokens that the target knows

    @property
    def graph_key(self) -> str:
        """What graphs depend on: models/device/graph_budget.py."""
        return f"{self.rule.graph_key} {self.verifier} {self.tree}"

    @property
    def coupled(self) -> bool:
        """Whether target and draft share the noise of each position."""
        return not self.rule.greedy and not self.verifier.ratio

    @property
    def ahead(self) -> int:
        """Positions behind the root that shared noise is made for."""
        return self.tree.deepest + 1 if self.coupled else 0

    def tokens(self, like: Tensor) -> Int[Tensor, " vocab"]:
        """All token ids, on the device of another tensor."""
        return torch.arange(self.vocab, device=like.device)

    @property
    def moved(self) -> int:
        """Tokens that a round may have to move: none of a chain, which is in place."""
        is_chain = all(len(level) == 1 for level in self.tree.levels) and self.tree.levels
        return (
            0 if not self.tree.copied and (is_chain or not self.tree.depth) else self.tree.deepest
        )


@dataclass(kw_only=True)
class Rows:
    """Where each row stands. The root is the last known token; its key is not in the cache yet."""

    row_ids: Int[Tensor, " batch"]  # from the data, never the batch slot: they key the noise
    lengths: Int[Tensor, " batch"]  # committed tokens, the root not counted
    root: Int[Tensor, " batch"]
    active: Bool[Tensor, " batch"]
    noise: Float[Tensor, "batch ahead vocab"] | None  # of the positions behind the root
    history: History | None  # up to the root, without it; None where nothing is penalised
    source: Int[Tensor, "batch moved"]  # slots of the last round's path, which the next pass moves
    goal: Int[Tensor, "batch moved"]  # to these


@dataclass(kw_only=True)
class Round:
    """What a round emitted."""

    ids: Int[Tensor, "batch path"]  # accepted draft tokens and the target's own one
    count: Int[Tensor, " batch"]  # how many of `ids`; 0 of rows without work
    along: Seen  # what the target computed along the path
    logits: Float[Tensor, "batch path vocab"]  # behind each node of the path
    scores: Float[Tensor, "batch path vocab"]  # what the target's token is the largest of
    told: Int[Tensor, "batch told"]  # all that the host reads: `ids` and `count` in one tensor


def seed_of(rule: SamplingRule, use: int) -> int:
    """A seed for each use of chance; the target's own is the user's."""
    return rule.seed + (use << 48)


def ahead_of(
    rule: SamplingRule, ahead: int, vocab: int, row_ids: Int[Tensor, " batch"],
    lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch ahead vocab"] | None:  # fmt: skip
    """The target's noise of the positions from `lengths` on, where the draft is to share it."""
    if not ahead:
        return None
    positions = lengths[:, None] + torch.arange(ahead, device=lengths.device)
    tokens = torch.arange(vocab, device=lengths.device)
    return gumbel(seed_of(rule, TARGET), row_ids, 0, positions, tokens)


def prefill(
    target: Transformer, cache: StaticCache, layers: list[int], rule: SamplingRule,
    ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"],
    row_ids: Int[Tensor, " batch"],
) -> tuple[
    Seen, Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"], History | None
]:  # fmt: skip
    """Read the padded prompts: what the target saw, and logits and scores of each first token.

    It knows nothing of trees, so that all decoders share its graphs, one a padded length.
    """
    count, slots = ids.shape[1], cache.garbage + 1
    places = torch.arange(count, device=ids.device).expand_as(ids)
    seen = target.see(
        ids, positions=places, mask=prompt_mask(lengths, count, slots),
        layers=layers, cache=cache, write=Write.at(places),
    )  # fmt: skip
    last = (lengths - 1).clamp_min(0)[:, None, None].expand(-1, 1, seen.hidden.shape[-1])
    logits = target.logits(seen.hidden.gather(1, last))[:, 0]
    history = None
    if rule.penalises:
        history = History.of(ids, lengths, logits.shape[-1])
    scores = rule.warp(logits, history)
    if not rule.greedy:
        tokens = torch.arange(logits.shape[-1], device=ids.device)
        noise = gumbel(seed_of(rule, TARGET), row_ids, 0, lengths[:, None], tokens)
        scores = scores + noise[:, 0]
    return seen, logits, scores, history


def opened(
    rule: SamplingRule, ahead: int, moved: int, garbage: int, row_ids: Int[Tensor, " batch"],
    lengths: Int[Tensor, " batch"], scores: Float[Tensor, "batch vocab"], history: History | None,
) -> tuple[Rows, Rows, Proposal]:  # fmt: skip
    """Rows behind their prompts, and an empty tree: the likeliest token of each row is its root.

    The rows come twice. A draft may keep tensors of those that it is told, and rounds of a row that
    share a tensor with the draft's state would have a graph of their own.
    """
    source, goal = (
        torch.full((len(lengths), moved), garbage, device=lengths.device) for _ in range(2)
    )
    rows = Rows(
        row_ids=row_ids, lengths=lengths, root=scores.argmax(-1), active=lengths > 0,
        noise=ahead_of(rule, ahead, scores.shape[-1], row_ids, lengths + 1),
        history=history, source=source, goal=goal,
    )  # fmt: skip
    told = replace(rows, lengths=lengths.clone(), root=rows.root.clone())
    none = lengths.new_zeros(len(lengths), 0)
    return rows, told, Proposal(ids=none, parents=none.clone())


def score(
    target: Transformer, cache: StaticCache, layers: list[int], rows: Rows, proposal: Proposal
) -> tuple[Seen, Float[Tensor, "batch verified vocab"]]:
    """One target pass over root and nodes, and the logits behind each of them."""
    ids = torch.cat([rows.root[:, None], proposal.ids], 1)
    nodes, slots = ids.shape[1], cache.garbage + 1
    sees = ancestors(proposal.parents)
    place = rows.lengths[:, None] + torch.arange(nodes, device=ids.device)
    seen = target.see(
        ids, positions=rows.lengths[:, None] + depths(sees),
        mask=tree_mask(rows.lengths, sees, slots), layers=layers, cache=cache,
        write=Write(
            slots=torch.where(rows.active[:, None], place, cache.garbage),
            source=rows.source, goal=rows.goal,
        ),
    )  # fmt: skip
    return seen, target.logits(seen.hidden)


def accept(
    plan: Plan, garbage: int, rows: Rows, proposal: Proposal, seen: Seen,
    logits: Float[Tensor, "batch verified vocab"],
) -> tuple[Rows, Round]:  # fmt: skip
    """Keep one path of the tree: the rows after the round, and what it emitted."""
    scored = _scored(plan, rows, proposal, logits)
    kept = plan.verifier.accept(scored, plan.tree.deepest)
    count = torch.where(rows.active, kept.count, 0)
    step = torch.arange(1, rows.source.shape[1] + 1, device=count.device)
    moves = step < count[:, None]
    lengths = rows.lengths + count
    last = kept.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    after = Rows(
        row_ids=rows.row_ids, lengths=lengths, active=rows.active,
        root=torch.where(rows.active, last, rows.root),
        noise=ahead_of(plan.rule, plan.ahead, plan.vocab, rows.row_ids, lengths + 1),
        history=rows.history
        and rows.history.add(torch.cat([rows.root[:, None], kept.ids[:, :-1]], 1), count),
        source=torch.where(
            moves, rows.lengths[:, None] + kept.nodes[:, 1 : 1 + len(step)], garbage
        ),
        goal=torch.where(moves, rows.lengths[:, None] + step, garbage),
    )  # fmt: skip
    return after, Round(
        ids=kept.ids, count=count,
        along=Seen(
            hidden=_along(seen.hidden, kept.nodes), captured=_along(seen.captured, kept.nodes)
        ),
        logits=_along(logits, kept.nodes), scores=_along(scored.scores, kept.nodes),
        told=torch.cat([kept.ids, count[:, None]], 1),
    )  # fmt: skip


def _along(
    values: Float[Tensor, "batch verified width"], path: Int[Tensor, "batch path"]
) -> Float[Tensor, "batch path width"]:
    """Those of the nodes of a path."""
    if not values.shape[-1]:  # of what is not captured, which XLA cannot gather
        return values[:, : path.shape[1]]
    return values.gather(1, path[:, :, None].expand(-1, -1, values.shape[-1]))


def _scored(plan: Plan, rows: Rows, proposal: Proposal, logits: Tensor) -> Scored:
    """The target's distributions, and the chance that its verifier asks for."""
    sees = ancestors(proposal.parents)
    history = rows.history
    if history is not None:
        history = history.along(torch.cat([rows.root[:, None], proposal.ids], 1), sees)
    warped = plan.rule.warp(logits, history)
    if plan.rule.greedy:
        return Scored(proposal=proposal, warped=warped)
    if rows.noise is not None:
        depth = depths(sees)[:, :, None].expand(-1, -1, warped.shape[-1])
        return Scored(proposal=proposal, warped=warped, noise=rows.noise.gather(1, depth))
    node = torch.arange(warped.shape[1], device=warped.device).expand(len(warped), -1)
    # a round is told by its length: no two rounds of a row have the same
    row_ids, turn = rows.row_ids, rows.lengths
    return Scored(
        proposal=proposal, warped=warped,
        noise=gumbel(seed_of(plan.rule, RESIDUAL), row_ids, turn, node, plan.tokens(node)),
        coins=uniform(seed_of(plan.rule, COINS), row_ids, turn, node[:, 1:]),
    )  # fmt: skip


def move(cache: StaticCache, rows: Rows) -> Rows:
    """Put the accepted path where it belongs now, and leave nothing to the next pass."""
    cache.move(rows.source, rows.goal)
    nowhere = torch.full_like(rows.source, cache.garbage)
    return replace(rows, source=nowhere, goal=nowhere.clone())


def begin(
    draft: Draft, state: State, plan: Plan, ids: Int[Tensor, "batch prompt"], rows: Rows,
    seen: Seen,
) -> tuple[State, Proposal]:  # fmt: skip
    """Show the draft the prompt and its first token, and take its first proposal."""
    state = draft.start(state, ids, lengths=rows.lengths, first=rows.root, seen=seen)
    return state, draft.propose(state, tree=plan.tree, sampler=_sampler(plan, rows))


def go_on(
    draft: Draft, state: State, plan: Plan, rows: Rows, emitted: Round
) -> tuple[State, Proposal]:
    """Show the draft what was emitted, and take its next proposal."""
    state = draft.advance(state, emitted.ids, count=emitted.count, seen=emitted.along)
    return state, draft.propose(state, tree=plan.tree, sampler=_sampler(plan, rows))


def fused(
    target: Transformer, cache: StaticCache, layers: list[int], plan: Plan, draft: Draft | None,
    state: State, rows: Rows, proposal: Proposal,
) -> tuple[Rows, Round, State, Proposal]:  # fmt: skip
    """A whole round in one graph."""
    seen, logits = score(target, cache, layers, rows, proposal)
    rows, emitted = accept(plan, cache.garbage, rows, proposal, seen, logits)
    if draft is not None:
        state, proposal = go_on(draft, state, plan, rows, emitted)
    return rows, emitted, state, proposal


def _sampler(plan: Plan, rows: Rows) -> Sampler:
    history = rows.history
    if history is not None:
        history = history.add(rows.root[:, None], torch.ones_like(rows.root))
    if not plan.verifier.draws(plan.tree):  # in ratio tests `rows.noise` is None
        return Sampler(rule=plan.rule, noise=rows.noise, history=history)
    positions = torch.arange(plan.tree.depth, device=rows.root.device).expand(len(rows.root), -1)
    seed, tokens = seed_of(plan.rule, DRAFT), plan.tokens(positions)
    noise = gumbel(seed, rows.row_ids, rows.lengths, positions, tokens)
    return Sampler(rule=plan.rule, noise=noise, history=history, draws=True)
