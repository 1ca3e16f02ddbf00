"""The steps of a decoding round, as functions of tensors of fixed shapes, each one compiled graph.

    fused      one graph:    score the tree, accept a path, advance the draft, take its proposal
    unfused    four graphs:  score | accept | move | draft_next; the reference, with timed parts

The fused round leaves the keys of the accepted tokens in the tree's slots; the next pass moves them
layer by layer (models/target/cache.py). The unfused round moves them at once. Both emit the same
tokens.

Functions take all that they read or write as arguments, so decoders of equal shapes share graphs.

Axes: B rows, P padded prompt, N nodes, D deepest node, S slots, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass

from infer.engine.row_tensors import make_contiguous
from infer.verify import AcceptanceRule, ScoredNodes, ScoredTree, accept_root
from models.drafts.base import Draft, DraftState
from models.speculate.config import SamplingConf
from models.speculate.growth import Proposal, ancestor_mask, node_depths
from models.speculate.sampling import History, Sampler, gumbel_noise, uniform_noise, warp_logits
from models.speculate.tree import Tree
from models.target.cache import CacheMoves, CacheWrite, StaticCache, prompt_mask, tree_mask
from models.target.language_model import LanguageModel, TargetOutput

# The uses of random numbers; each derives its own seed. Ratio tests are exact only if draft,
# coins and residual share no noise (docs/exactness.md).
TARGET_NOISE, DRAFT_NOISE, COIN_NOISE, RESIDUAL_NOISE = range(4)


@dataclass(frozen=True, kw_only=True)
class DecodePolicy:
    """The settings that all rounds of a decoder share."""

    sampling_rule: SamplingConf
    acceptance_rule: AcceptanceRule
    tree: Tree
    vocab_size: int  # of the target

    @property
    def graph_key(self) -> str:
        """Return a string that is equal for equal graphs: models/device/graph_budget.py."""
        return f"{self.sampling_rule.graph_key} {self.acceptance_rule} {self.tree}"

    @property
    def lookahead(self) -> int:
        """Return the number of positions after the root whose noise target and draft share."""
        is_coupled = not self.sampling_rule.is_greedy and not self.acceptance_rule.is_ratio_test
        # + 1: after the deepest node, the target emits a token of its own
        return self.tree.max_path_length + 1 if is_coupled else 0

    @property
    def max_moves(self) -> int:
        """Return how many tokens a round may have to move: 0 for a chain, which is in place."""
        # A chain has one node per level; a dynamic tree has no levels.
        is_chain = sum(map(len, self.tree.levels)) == self.tree.depth
        return 0 if is_chain and not self.tree.ngram_tokens else self.tree.max_path_length


@dataclass(kw_only=True)
class SlotState:
    """The decoding state of each row.

    The root is the last known token; its key is not in the cache yet.
    """

    row_ids: Int[Tensor, " batch"]  # from the data, not indices into the batch: they key the noise
    lengths: Int[Tensor, " batch"]  # committed tokens, without the root
    root: Int[Tensor, " batch"]
    active: Bool[Tensor, " batch"]
    noise: Float[Tensor, "batch lookahead vocab"] | None  # of the positions after the root
    history: History | None  # of the tokens before the root; None without penalties
    moves: CacheMoves | None  # of the last round's path, for the next pass; None if it is in place


@dataclass(kw_only=True)
class RoundOutput:
    """The tokens that a round emitted, and the target's output for them."""

    ids: Int[Tensor, "batch path"]  # accepted draft tokens, then the target's own token
    count: Int[Tensor, " batch"]  # valid entries of `ids`; 0 in inactive rows
    target_output: TargetOutput  # of the path's nodes
    logits: Float[Tensor, "batch path vocab"]  # after each node of the path
    scores: Float[Tensor, "batch path vocab"]  # the target's token is their argmax
    host_copy: Int[Tensor, "batch path_and_count"]  # `ids` and `count` in one tensor, for the host


# tree_map enters these.
for _container in (SlotState, RoundOutput, Proposal, History, TargetOutput, CacheMoves):
    register_dataclass(_container)


def derive_seed(rule: SamplingConf, use: int) -> int:
    """Return the seed of one use of random numbers; TARGET_NOISE has the user's seed."""
    return rule.seed + (use << 48)  # far apart: users' seeds are smaller


def lookahead_noise(
    rule: SamplingConf, lookahead: int, vocab_size: int, row_ids: Int[Tensor, " batch"],
    lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch lookahead vocab"] | None:  # fmt: skip
    """Return the target's noise of the positions from `lengths` on; None if it is not shared."""
    if not lookahead:
        return None
    positions = lengths[:, None] + torch.arange(lookahead, device=lengths.device)
    return _keyed_noise(rule, TARGET_NOISE, vocab_size, row_ids, 0, positions)


def _keyed_noise(
    rule: SamplingConf, use: int, vocab_size: int, row_ids: Int[Tensor, " batch"],
    turn: int | Int[Tensor, " batch"], positions: Int[Tensor, "batch positions"],
) -> Float[Tensor, "batch positions vocab"]:  # fmt: skip
    """Return the Gumbel noise of all tokens at positions, for one use of random numbers."""
    tokens = torch.arange(vocab_size, device=positions.device)
    return gumbel_noise(derive_seed(rule, use), row_ids, turn, positions, tokens)


def prefill(
    target: LanguageModel, cache: StaticCache, layers: list[int], rule: SamplingConf,
    input_ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"],
    row_ids: Int[Tensor, " batch"],
) -> tuple[
    TargetOutput, Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"], History | None
]:  # fmt: skip
    """Read the padded prompts into `cache`, which is changed in place.

    Return the target's output, the logits and scores of the first tokens, and the history. Nothing
    here depends on the tree, so all decoders share these graphs, one per padded length.
    """
    num_positions, num_slots = input_ids.shape[1], cache.garbage_slot + 1
    positions = torch.arange(num_positions, device=input_ids.device).expand_as(input_ids)
    target_output = target.forward_hidden(
        input_ids, positions=positions, mask=prompt_mask(lengths, num_positions, num_slots),
        layers=layers, cache=cache, write=CacheWrite.at(positions),
    )  # fmt: skip
    last = (lengths - 1).clamp_min(0)[:, None, None].expand(-1, 1, target_output.hidden.shape[-1])
    logits = target.logits(target_output.hidden.gather(1, last))[:, 0]
    vocab_size = logits.shape[-1]
    history = History.from_prompts(input_ids, lengths, vocab_size) if rule.has_penalties else None
    scores = warp_logits(rule, logits, history)
    if not rule.is_greedy:
        positions = lengths[:, None]
        scores = scores + _keyed_noise(rule, TARGET_NOISE, vocab_size, row_ids, 0, positions)[:, 0]
    return target_output, logits, scores, history


def open_slots(
    rule: SamplingConf, lookahead: int, max_moves: int, garbage_slot: int,
    row_ids: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"],
    scores: Float[Tensor, "batch vocab"], history: History | None,
) -> tuple[SlotState, SlotState]:  # fmt: skip
    """Return the state of the rows after their prompts, and a copy for the draft.

    The root of each row is the argmax of its scores. The draft needs a copy because it may keep
    tensors of its rows: if the rows of a round shared a tensor with the draft's state, that round
    would need a graph of its own.
    """
    rows = SlotState(
        row_ids=row_ids, lengths=lengths, root=scores.argmax(-1), active=lengths > 0,
        noise=lookahead_noise(rule, lookahead, scores.shape[-1], row_ids, lengths + 1),
        history=history, moves=_no_moves(len(lengths), max_moves, garbage_slot, lengths.device),
    )  # fmt: skip
    return make_contiguous((rows, replace(rows, lengths=lengths.clone(), root=rows.root.clone())))


def _no_moves(
    batch: int, max_moves: int, garbage_slot: int, device: torch.device
) -> CacheMoves | None:
    """Return moves of the garbage slot to itself, or None if rounds move nothing."""
    if not max_moves:
        return None
    source, destination = (
        torch.full((batch, max_moves), garbage_slot, device=device) for _ in range(2)
    )
    return CacheMoves(source=source, destination=destination)


def _verified_nodes(
    rows: SlotState, proposal: Proposal | None
) -> tuple[Int[Tensor, "batch verified"], Bool[Tensor, "batch verified verified"]]:
    """Return the tokens of root and nodes, and the mask of each one's ancestors and itself."""
    root = rows.root[:, None]
    if proposal is None:
        return root, torch.ones_like(root, dtype=torch.bool)[:, None]
    return torch.cat([root, proposal.ids], 1), ancestor_mask(proposal.parents)


def score(
    target: LanguageModel,
    cache: StaticCache,
    layers: list[int],
    rows: SlotState,
    proposal: Proposal | None,
) -> tuple[TargetOutput, Float[Tensor, "batch verified vocab"]]:
    """Run the target once over root and nodes; return its output and the logits after each.

    The cache is changed in place: keys of the last round's path are moved, those of root and nodes
    are added.
    """
    input_ids, ancestors = _verified_nodes(rows, proposal)
    num_nodes, num_slots = input_ids.shape[1], cache.garbage_slot + 1
    slots = rows.lengths[:, None] + torch.arange(num_nodes, device=input_ids.device)
    target_output = target.forward_hidden(
        input_ids, positions=rows.lengths[:, None] + node_depths(ancestors),
        mask=tree_mask(rows.lengths, ancestors, num_slots), layers=layers, cache=cache,
        write=CacheWrite(
            slots=torch.where(rows.active[:, None], slots, cache.garbage_slot),
            moves=rows.moves,
        ),
    )  # fmt: skip
    return target_output, target.logits(target_output.hidden)


def accept(
    policy: DecodePolicy, garbage_slot: int, rows: SlotState, proposal: Proposal | None,
    target_output: TargetOutput, logits: Float[Tensor, "batch verified vocab"],
) -> tuple[SlotState, RoundOutput]:  # fmt: skip
    """Accept one path of the tree; return the rows after the round, and the emitted tokens."""
    scored = _score_nodes(policy, rows, proposal, logits)
    if proposal is None:
        path = accept_root(scored)
    else:
        path = policy.acceptance_rule.accept(
            ScoredTree(proposal=proposal, **vars(scored)), policy.tree.max_path_length
        )
    count = torch.where(rows.active, path.count, 0)
    lengths = rows.lengths + count
    last = path.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]  # inactive rows have count 0
    next_rows = SlotState(
        row_ids=rows.row_ids,
        lengths=lengths,
        active=rows.active,
        root=torch.where(rows.active, last, rows.root),
        noise=lookahead_noise(
            policy.sampling_rule, policy.lookahead, policy.vocab_size, rows.row_ids, lengths + 1
        ),
        history=rows.history
        and rows.history.add(torch.cat([rows.root[:, None], path.ids], 1)[:, :-1], count),
        moves=rows.moves and _moves_of_path(rows.lengths, path.nodes[:, 1:], count, garbage_slot),
    )
    round_output = RoundOutput(
        ids=path.ids, count=count,
        target_output=target_output.map_tensors(lambda values: _on_path(values, path.nodes)),
        logits=_on_path(logits, path.nodes), scores=_on_path(scored.scores, path.nodes),
        host_copy=torch.cat([path.ids, count[:, None]], 1),
    )  # fmt: skip
    return make_contiguous((next_rows, round_output))


def _moves_of_path(
    lengths: Int[Tensor, " batch"], nodes: Int[Tensor, "batch depth"],
    count: Int[Tensor, " batch"], garbage_slot: int,
) -> CacheMoves:  # fmt: skip
    """Return the moves of a path's `nodes`, of which rows emitted `count - 1`, behind the root."""
    # The root is in place, and the target's own token, the last of `count`, has no key yet.
    offset = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    is_moved = offset < count[:, None]
    return CacheMoves(
        source=torch.where(is_moved, lengths[:, None] + nodes, garbage_slot),
        destination=torch.where(is_moved, lengths[:, None] + offset, garbage_slot),
    )


def _on_path(
    values: Float[Tensor, "batch verified width"], path: Int[Tensor, "batch path"]
) -> Float[Tensor, "batch path width"]:
    """Return the values at the nodes of each row's path."""
    return values.gather(1, path[:, :, None].expand(-1, -1, values.shape[-1]))


def _score_nodes(
    policy: DecodePolicy, rows: SlotState, proposal: Proposal | None, logits: Tensor
) -> ScoredNodes:
    """Return the target's distributions and the random numbers that the acceptance rule needs."""
    node_ids, ancestors = _verified_nodes(rows, proposal)
    history = rows.history and rows.history.on_path(node_ids, ancestors)
    warped = warp_logits(policy.sampling_rule, logits, history)
    if policy.sampling_rule.is_greedy:
        return ScoredNodes(warped_logits=warped)
    if rows.noise is not None:
        depth = node_depths(ancestors)[:, :, None].expand(-1, -1, warped.shape[-1])
        return ScoredNodes(warped_logits=warped, noise=rows.noise.gather(1, depth))
    node = torch.arange(warped.shape[1], device=warped.device).expand(len(warped), -1)
    # No two rounds of a row start at the same length, so the length identifies the round.
    row_ids, turn = rows.row_ids, rows.lengths
    return ScoredNodes(
        warped_logits=warped,
        noise=_keyed_noise(
            policy.sampling_rule, RESIDUAL_NOISE, policy.vocab_size, row_ids, turn, node
        ),
        uniforms=proposal
        and uniform_noise(
            derive_seed(policy.sampling_rule, COIN_NOISE), row_ids, turn, node[:, 1:]
        ),
    )


def move(cache: StaticCache, rows: SlotState) -> SlotState:
    """Move keys of the accepted path to their final slots in `cache`; return rows without moves."""
    assert rows.moves is not None
    cache.move(rows.moves)
    batch, max_moves = rows.moves.source.shape
    device = rows.moves.source.device
    return replace(rows, moves=_no_moves(batch, max_moves, cache.garbage_slot, device))


def begin(
    draft: Draft,
    state: DraftState,
    policy: DecodePolicy,
    input_ids: Int[Tensor, "batch prompt"],
    rows: SlotState,
    target_output: TargetOutput,
) -> tuple[DraftState, Proposal]:
    """Start the draft after the prompt and its first token; return its state and a proposal."""
    state = draft.start(
        state, input_ids, lengths=rows.lengths, first_token=rows.root, target_output=target_output
    )
    proposal = draft.propose(state, tree=policy.tree, sampler=make_sampler(policy, rows))
    return make_contiguous((state, proposal))


def draft_next(
    draft: Draft,
    state: DraftState,
    policy: DecodePolicy,
    rows: SlotState,
    round_output: RoundOutput,
) -> tuple[DraftState, Proposal]:
    """Advance the draft by the emitted tokens; return its state and its next proposal."""
    state = draft.advance(
        state, round_output.ids, count=round_output.count, target_output=round_output.target_output
    )
    proposal = draft.propose(state, tree=policy.tree, sampler=make_sampler(policy, rows))
    return make_contiguous((state, proposal))


def fused(
    target: LanguageModel,
    cache: StaticCache,
    layers: list[int],
    policy: DecodePolicy,
    draft: Draft | None,
    state: DraftState,
    rows: SlotState,
    proposal: Proposal | None,
) -> tuple[SlotState, RoundOutput, DraftState, Proposal | None]:
    """Run a whole round in one graph; return the results of `accept` and of `draft_next`."""
    target_output, logits = score(target, cache, layers, rows, proposal)
    rows, round_output = accept(policy, cache.garbage_slot, rows, proposal, target_output, logits)
    if draft is not None:
        state, proposal = draft_next(draft, state, policy, rows, round_output)
    return rows, round_output, state, proposal


def make_sampler(policy: DecodePolicy, rows: SlotState) -> Sampler:
    """Build the draft's sampler for the tokens after the root of each row."""
    history = rows.history and rows.history.add(rows.root[:, None], torch.ones_like(rows.root))
    if not policy.acceptance_rule.needs_drawn_tokens(policy.tree):
        # This is the noise of coupled sampling. It is None in a ratio test, whose dynamic tree is
        # built without noise.
        return Sampler(rule=policy.sampling_rule, noise=rows.noise, history=history)
    positions = torch.arange(policy.tree.depth, device=rows.root.device).expand(len(rows.root), -1)
    noise = _keyed_noise(
        policy.sampling_rule, DRAFT_NOISE, policy.vocab_size, rows.row_ids, rows.lengths, positions
    )
    return Sampler(rule=policy.sampling_rule, noise=noise, history=history, draws=True)
