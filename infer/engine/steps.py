"""The steps of a decoding round, as functions of tensors of fixed shapes, each one compiled graph.

    fused      one graph:           verify the tree, accept a path, advance the draft, take its proposal
    unfused    up to four graphs:   verify | accept | cache_move | draft; the reference, with timed parts

Accepted keys are moved by the next pass of a fused round (models/targets/cache.py), at once in an unfused round. A step
takes all that it reads as arguments, so that decoders of equal shapes share graphs.

Axes: batch is rows, path the tokens that a round may emit: those of the tree's longest path and one more.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass

from infer.engine.row_tensors import make_contiguous
from infer.verify.base import AcceptanceRule, ScoredNodes, accept_root
from models.drafts.base import Draft, DraftState, EmittedPath, ReadPrompts
from models.targets.cache import CacheMoves, CacheWrite, StaticCache, prompt_mask, tree_mask
from models.targets.language_model import LanguageModel, TargetOutput
from models.trees.growth import Proposal, ancestor_mask, node_depths
from models.trees.keyed_noise import gumbel_noise, uniform_noise
from models.trees.sampling import History, Sampler, warp_logits
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree

# The uses of random numbers; each derives its own seed. Ratio tests are exact only if draft,
# coins and residual share no noise (docs/exactness.md).
TARGET_NOISE, DRAFT_NOISE, COIN_NOISE, RESIDUAL_NOISE = range(4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The models and settings that all steps of a session read, and none changes."""

    target: LanguageModel
    draft: Draft | None
    layers: list[int]  # captured layers of the target
    tree: Tree
    sampling: SamplingConf
    acceptance_rule: AcceptanceRule
    vocab_size: int  # of the target; steps of the draft do not read `target`

    @property
    def lookahead(self) -> int:
        """Return the number of positions after the root whose noise target and draft share."""
        is_ratio_test = self.acceptance_rule.verification.is_ratio_test
        # + 1: after the deepest node, the target emits a token of its own
        return self.tree.max_path_length + 1 if not (self.sampling.is_greedy or is_ratio_test) else 0

    @property
    def max_moves(self) -> int:
        """Return how many tokens a round may have to move: 0 for a chain, which is in place."""
        return 0 if self.tree.is_in_place else self.tree.max_path_length


@dataclass(kw_only=True)
class RowState:
    """The decoding state of each row; the root is the last known token, whose key is not in the cache yet."""

    row_limbs: Int[Tensor, "batch limbs"]  # of row ids of the data, not indices into the batch: they key the noise
    lengths: Int[Tensor, " batch"]  # committed tokens, without the root
    root: Int[Tensor, " batch"]
    active: Bool[Tensor, " batch"]  # has a running request; the host sets it before each round
    noise: Float[Tensor, "batch lookahead vocab"] | None  # of the positions after the root
    history: History | None  # of the tokens before the root; None without penalties
    moves: CacheMoves | None  # of the last round's path, for the next pass; None if no round moves any


@dataclass(kw_only=True)
class SessionState:
    """The state that one step hands to the next."""

    rows: RowState
    proposal: Proposal | None  # the tree that the next round verifies; None without a draft
    cache: StaticCache  # of the target; steps change it in place
    draft_state: DraftState


@dataclass(kw_only=True)
class RoundOutput:
    """The tokens that a round emitted, and the target's output for them."""

    ids: Int[Tensor, "batch path"]  # accepted draft tokens, then the target's own token
    count: Int[Tensor, " batch"]  # valid entries of `ids`; 0 in inactive rows
    target_output: TargetOutput  # of the path's nodes
    logits: Float[Tensor, "batch path vocab"]  # after each node of the path
    # Warped logits, plus noise; their argmax is the target's token, but not by a ratio test.
    scores: Float[Tensor, "batch path vocab"]
    ids_and_count: Int[Tensor, "batch path_and_count"]  # in one tensor, which the host reads at once


# tree_map enters these.
for _container in (SessionState, RowState, RoundOutput, Proposal, History, TargetOutput, CacheMoves):
    register_dataclass(_container)


def derive_seed(sampling: SamplingConf, use: int) -> int:
    """Return the seed of one use of random numbers; TARGET_NOISE has the user's seed."""
    return sampling.seed + (use << 48)  # far apart: users' seeds are smaller


def lookahead_noise(
    sampling: SamplingConf,
    lookahead: int,
    vocab_size: int,
    row_limbs: Int[Tensor, "batch limbs"],
    first_positions: Int[Tensor, " batch"],
) -> Float[Tensor, "batch lookahead vocab"] | None:
    """Return the target's noise of the positions from `first_positions` on; None if it is not shared."""
    if not lookahead:
        return None
    positions = first_positions[:, None] + torch.arange(lookahead, device=first_positions.device)
    return _keyed_noise(sampling, TARGET_NOISE, vocab_size, row_limbs, 0, positions)


def _keyed_noise(
    sampling: SamplingConf,
    use: int,
    vocab_size: int,
    row_limbs: Int[Tensor, "batch limbs"],
    round_start: int | Int[Tensor, " batch"],
    places: Int[Tensor, "batch places"],
) -> Float[Tensor, "batch places vocab"]:
    """Return the Gumbel noise of all tokens at some places, for one use of random numbers."""
    tokens = torch.arange(vocab_size, device=places.device)
    return gumbel_noise(derive_seed(sampling, use), row_limbs, round_start, places, tokens)


def prefill(
    program: Program,
    cache: StaticCache,
    input_ids: Int[Tensor, "batch prompt"],
    lengths: Int[Tensor, " batch"],
    row_limbs: Int[Tensor, "batch limbs"],
) -> tuple[TargetOutput, Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"], History | None]:
    """Read padded prompts into `cache`; return the target's output, first tokens' logits and scores, and history."""
    target, sampling = program.target, program.sampling
    _guard_on_slots(cache)
    num_positions = input_ids.shape[1]
    positions = torch.arange(num_positions, device=input_ids.device).expand_as(input_ids)
    target_output = target.forward_hidden(
        input_ids,
        positions=positions,
        mask=prompt_mask(lengths, num_positions, cache.num_slots),
        layers=program.layers,
        cache=cache,
        write=CacheWrite(slots=positions),
    )
    last = (lengths - 1).clamp_min(0)[:, None, None].expand(-1, 1, target_output.hidden.shape[-1])
    logits = target.logits(target_output.hidden.gather(1, last))[:, 0]
    vocab = logits.shape[-1]
    history = History.from_prompts(input_ids, lengths, vocab) if sampling.has_penalties else None
    scores = warp_logits(sampling, logits, history)
    if not sampling.is_greedy:
        positions = lengths[:, None]
        scores = scores + _keyed_noise(sampling, TARGET_NOISE, vocab, row_limbs, 0, positions)[:, 0]
    return target_output, logits, scores, history


def _guard_on_slots(cache: StaticCache) -> None:
    """Read the numbers of slots, which dynamo then guards on: FROZEN_PREFIXES drops the guards on the tensors."""
    assert cache.num_slots <= cache.allocated_slots


def start_rows(
    sampling: SamplingConf,
    lookahead: int,
    max_moves: int,
    row_limbs: Int[Tensor, "batch limbs"],
    lengths: Int[Tensor, " batch"],
    scores: Float[Tensor, "batch vocab"],
    history: History | None,
) -> RowState:
    """Return the state of the rows after their prompts; the root is the argmax of the scores."""
    rows = RowState(
        row_limbs=row_limbs,
        lengths=lengths,
        root=scores.argmax(-1),
        active=lengths > 0,
        noise=lookahead_noise(sampling, lookahead, scores.shape[-1], row_limbs, lengths + 1),
        history=history,
        moves=_no_moves(len(lengths), max_moves, lengths.device),
    )
    return make_contiguous(rows)


def _no_moves(batch: int, max_moves: int, device: torch.device) -> CacheMoves | None:
    """Return moves of the first slot to itself, or None if rounds move nothing."""
    if not max_moves:
        return None
    source, destination = (torch.zeros((batch, max_moves), dtype=torch.int64, device=device) for _ in range(2))
    return CacheMoves(source=source, destination=destination)


def begin(
    program: Program, state: SessionState, input_ids: Int[Tensor, "batch prompt"], target_output: TargetOutput
) -> SessionState:
    """Start the draft after the prompt and its first token; it makes its first proposal."""
    assert program.draft is not None
    rows = state.rows
    # The draft may keep what it is given. Copies, because a round whose draft shares a tensor with
    # the rows would need a graph of its own.
    prompts = ReadPrompts(
        ids=input_ids, lengths=rows.lengths.clone(), first_token=rows.root.clone(), target_output=target_output
    )
    return _propose(program, state, program.draft.start(state.draft_state, prompts))


def draft(program: Program, state: SessionState, output: RoundOutput) -> SessionState:
    """Advance the draft by the emitted tokens; it makes its next proposal."""
    assert program.draft is not None
    emitted = EmittedPath(ids=output.ids, count=output.count, target_output=output.target_output)
    return _propose(program, state, program.draft.advance(state.draft_state, emitted))


def _propose(program: Program, state: SessionState, draft_state: DraftState) -> SessionState:
    """Return the state with the proposal that the draft makes in `draft_state`."""
    assert program.draft is not None
    proposal = program.draft.propose(draft_state, tree=program.tree, sampler=_make_sampler(program, state.rows))
    draft_state, proposal = make_contiguous((draft_state, proposal))
    return replace(state, draft_state=draft_state, proposal=proposal)


def _make_sampler(program: Program, rows: RowState) -> Sampler:
    """Build the draft's sampler for the tokens after the root of each row."""
    sampling, tree = program.sampling, program.tree
    history = rows.history and rows.history.add(rows.root[:, None], torch.ones_like(rows.root))
    if not program.acceptance_rule.needs_drawn_tokens(tree):
        # The noise of coupled sampling, or None: a greedy draft has none, and a dynamic tree of a
        # ratio test is built without.
        return Sampler(rule=sampling, noise=rows.noise, history=history)
    levels = torch.arange(tree.depth, device=rows.root.device).expand(len(rows.root), -1)
    noise = _keyed_noise(sampling, DRAFT_NOISE, program.vocab_size, rows.row_limbs, rows.lengths, levels)
    return Sampler(rule=sampling, noise=noise, history=history, draws=True)


def fused(program: Program, state: SessionState) -> tuple[SessionState, RoundOutput]:
    """Run a whole round in one graph; return the next state and the emitted tokens."""
    target_output, logits = verify(program, state)
    state, output = accept(program, state, target_output, logits)
    if program.draft is not None:
        state = draft(program, state, output)
    return state, output


def verify(program: Program, state: SessionState) -> tuple[TargetOutput, Float[Tensor, "batch verified vocab"]]:
    """Run the target once over root and nodes; return its output and the logits after each.

    The cache is changed in place: keys of the last round's path are moved, those of root and nodes are added.
    """
    rows, cache, target = state.rows, state.cache, program.target
    _guard_on_slots(cache)
    input_ids, ancestors = _verified_nodes(rows, state.proposal)
    slots = rows.lengths[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
    target_output = target.forward_hidden(
        input_ids,
        positions=rows.lengths[:, None] + node_depths(ancestors),
        mask=tree_mask(rows.lengths, ancestors, cache.num_slots),
        layers=program.layers,
        cache=cache,
        # A row that has ended may have no slots left: it writes to the last, which nothing reads, and moves nothing.
        write=CacheWrite(slots=slots.clamp_max(cache.num_slots - 1), moves=rows.moves and rows.moves.of(rows.active)),
    )
    return target_output, target.logits(target_output.hidden)


def _verified_nodes(
    rows: RowState, proposal: Proposal | None
) -> tuple[Int[Tensor, "batch verified"], Bool[Tensor, "batch verified verified"]]:
    """Return the tokens of root and nodes, and the mask of each one's ancestors and itself."""
    root = rows.root[:, None]
    if proposal is None:
        return root, torch.ones_like(root, dtype=torch.bool)[:, None]
    return torch.cat([root, proposal.ids], 1), ancestor_mask(proposal.parents)


def accept(
    program: Program, state: SessionState, target_output: TargetOutput, logits: Float[Tensor, "batch verified vocab"]
) -> tuple[SessionState, RoundOutput]:
    """Accept one path of the tree; return the state after the round, and the emitted tokens."""
    rows, proposal = state.rows, state.proposal
    scored = _warp_nodes(program, rows, proposal, logits)
    if proposal is None:
        path = accept_root(scored)
    else:
        path = program.acceptance_rule.accept(proposal, scored, program.tree.max_path_length)
    count = torch.where(rows.active, path.count, 0)
    lengths = rows.lengths + count
    last = path.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]  # inactive rows have count 0
    next_rows = RowState(
        row_limbs=rows.row_limbs,
        lengths=lengths,
        active=rows.active,
        root=torch.where(rows.active, last, rows.root),
        noise=lookahead_noise(program.sampling, program.lookahead, logits.shape[-1], rows.row_limbs, lengths + 1),
        # The root joins the history only now; the token after the path is the new root.
        history=rows.history and rows.history.add(torch.cat([rows.root[:, None], path.ids], 1)[:, :-1], count),
        moves=rows.moves and _moves_of_path(rows.lengths, path.nodes[:, 1:], count),
    )
    output = RoundOutput(
        ids=path.ids,
        count=count,
        target_output=target_output.map_tensors(lambda values: _on_path(values, path.nodes)),
        logits=_on_path(logits, path.nodes),
        scores=_on_path(scored.scores, path.nodes),
        ids_and_count=torch.cat([path.ids, count[:, None]], 1),
    )
    next_rows, output = make_contiguous((next_rows, output))
    return replace(state, rows=next_rows), output


def _moves_of_path(
    lengths: Int[Tensor, " batch"], nodes: Int[Tensor, "batch depth"], count: Int[Tensor, " batch"]
) -> CacheMoves:
    """Return the moves of a path's `nodes` (root 0), of which rows emitted `count - 1`, behind the root."""
    # The root is in place, and the target's own token, the last of `count`, has no key yet.
    offset = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    is_moved = offset < count[:, None]
    return CacheMoves(
        source=torch.where(is_moved, lengths[:, None] + nodes, 0),
        destination=torch.where(is_moved, lengths[:, None] + offset, 0),
    )


def _on_path(
    values: Float[Tensor, "batch verified width"], path: Int[Tensor, "batch path"]
) -> Float[Tensor, "batch path width"]:
    """Return the values at the nodes of each row's path."""
    return values.gather(1, path[:, :, None].expand(-1, -1, values.shape[-1]))


def _warp_nodes(program: Program, rows: RowState, proposal: Proposal | None, logits: Tensor) -> ScoredNodes:
    """Return the target's distributions and the random numbers that the acceptance rule needs."""
    sampling, vocab_size = program.sampling, logits.shape[-1]
    node_ids, ancestors = _verified_nodes(rows, proposal)
    history = rows.history and rows.history.on_path(node_ids, ancestors)
    warped = warp_logits(sampling, logits, history)
    if sampling.is_greedy:
        return ScoredNodes(warped_logits=warped)
    if rows.noise is not None:
        depth = node_depths(ancestors)[:, :, None].expand(-1, -1, vocab_size)
        return ScoredNodes(warped_logits=warped, noise=rows.noise.gather(1, depth))
    node = torch.arange(warped.shape[1], device=warped.device).expand(len(warped), -1)
    # No two rounds of a row start at the same length, so the length identifies the round.
    row_limbs, round_start = rows.row_limbs, rows.lengths
    return ScoredNodes(
        warped_logits=warped,
        noise=_keyed_noise(sampling, RESIDUAL_NOISE, vocab_size, row_limbs, round_start, node),
        uniforms=proposal and uniform_noise(derive_seed(sampling, COIN_NOISE), row_limbs, round_start, node[:, 1:]),
    )


def cache_move(state: SessionState) -> SessionState:
    """Move keys of the accepted path to their final slots now; a fused round leaves this to its next pass."""
    moves = state.rows.moves
    assert moves is not None
    state.cache.move(moves)
    batch, max_moves = moves.source.shape
    none = _no_moves(batch, max_moves, moves.source.device)
    return replace(state, rows=replace(state.rows, moves=none))
