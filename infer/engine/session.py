"""A decoding session: a target, a draft and a tree over fixed rows, and the steps of each round.

    prefill    read the prompts; the draft proposes its first trees
    verify     the target scores a proposal        }
    accept     one path of it is emitted           }  a round, which `run_round` fuses into one
    commit     its keys move to their final slots  }  graph unless its phases are timed
    propose    the draft takes the next proposal   }

The steps are functions of tensors (infer/engine/rounds.py), so that sessions of equal shapes share
graphs. A session holds what they read besides the state, and compiles them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass

from infer.config import Verification
from infer.engine import rounds
from infer.engine.rounds import DecodePolicy, RoundOutput, SlotState
from infer.engine.row_tensors import allocate_slots, empty_like, scatter_rows
from infer.verify import AcceptanceRule, build_acceptance_rule
from models.drafts.base import Draft, DraftState
from models.drafts.ngram import MixedDraft
from models.errors import require
from models.speculate.config import SamplingConf
from models.speculate.growth import Proposal
from models.speculate.tree import NO_TREE, Tree
from models.target.cache import StaticCache
from models.target.language_model import LanguageModel, TargetOutput
from models.target.target import Target

NO_DRAFT = "alone"  # the kind of rounds without a draft
MIN_SCRATCH_SLOTS = 32  # least number of slots kept for a round: see SLOT_ALIGNMENT
SLOT_ALIGNMENT = 32  # cache sizes are rounded up to it, so that different trees share graphs
# Arguments of target passes whose guards dynamo may skip: two other arguments identify them and are
# checked, the target's fingerprint and the cache's number of slots.
FROZEN_PREFIXES = ("target.decoder.", "cache.keys[", "cache.values[")


@dataclass(kw_only=True)
class SessionState:
    """The state that one step hands to the next."""

    rows: SlotState
    proposal: Proposal | None  # the tree that the next round verifies; None without a draft
    cache: StaticCache  # of the target
    draft_state: DraftState


register_dataclass(SessionState)  # tree_map enters it


def count_cache_slots(tree: Tree, slots: int) -> int:
    """Return the size of the caches: `slots`, a round's nodes, and tokens emitted past the end.

    The size is a multiple of SLOT_ALIGNMENT.
    """
    # + 1: a round emits its path and one token of the target's own
    scratch = max(max(tree.size, tree.scratch_slots) + tree.max_path_length + 1, MIN_SCRATCH_SLOTS)
    return -(-(slots + scratch) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT  # rounded up


class Session:
    """One target, one draft and one tree shape over `batch` rows of at most `slots` tokens."""

    def __init__(
        self, target: LanguageModel, draft: Draft | None = None, tree: Tree = NO_TREE, *,
        sampling: SamplingConf, slots: int, batch: int = 1, layers: list[int] | None = None,
        acceptance_rule: AcceptanceRule | None = None,
    ):  # fmt: skip
        max_depth = draft.max_depth if draft else 0
        require(
            draft is None or tree.depth <= max_depth,
            f"tree.depth: must be at most the {max_depth} tokens that the draft can propose, got "
            f"{tree.depth}; lower tree.depth or raise draft.max_depth",
        )
        rule = acceptance_rule or build_acceptance_rule(Verification.auto, sampling)
        rule.check(sampling, tree)
        if draft is not None and tree.ngram_tokens:
            draft = MixedDraft(draft)
        self.target, self.draft, self.tree = target, draft, tree
        self.batch, self.slots, self.depth = batch, slots, tree.max_path_length
        self.policy = DecodePolicy(
            sampling_rule=sampling, acceptance_rule=rule, tree=tree,
            vocab_size=target.vocab_size,
        )  # fmt: skip
        # all modes of an evaluation capture the same layers, to share graphs and to cost the same
        self.layers = layers or (draft.needs.layers if draft else [])
        device = target.device
        self.torch_device, self.synchronize = device.torch_device, device.synchronize
        self._allocate_slots = device.compile_if_lazy(allocate_slots)
        self._open_slots = device.compile_if_lazy(rounds.open_slots)
        self._empty_like = device.compile_if_lazy(empty_like)
        self._scatter_rows = device.compile_if_lazy(scatter_rows)
        # A Target's weights are frozen; those of a draft that generates text in its place are not.
        frozen = FROZEN_PREFIXES if isinstance(target, Target) else ()
        if isinstance(target, Target):
            device.arrange_weights(target.model)
            if draft is not None:
                device.arrange_weights(draft)
        kind = draft.graph_kind if draft else NO_DRAFT
        self._prefill = device.compile(rounds.prefill, frozen_names=frozen)
        self._begin = device.compile(rounds.begin, kind=kind)
        self._fused = device.compile(rounds.fused, frozen_names=frozen, kind=kind)
        self._score = device.compile(rounds.score, frozen_names=frozen)
        self._accept = device.compile(rounds.accept)
        self._move = device.compile(rounds.move)
        self._draft_next = device.compile(rounds.draft_next, kind=kind)
        self.cache, self.state = self._allocate(batch)
        self._side_buffers: tuple[StaticCache, DraftState] | None = None

    def _allocate(self, batch: int) -> tuple[StaticCache, DraftState]:
        cache_slots = count_cache_slots(self.tree, self.slots)
        return self._allocate_slots(self.target, self.draft, batch, cache_slots)

    def side_buffers(self, batch: int) -> tuple[StaticCache, DraftState]:
        """Return buffers for prompts that are prefilled while the session's rows hold answers.

        They are reused until a different `batch` is needed.
        """
        if self._side_buffers is None or len(self._side_buffers[0].positions) != batch:
            self._side_buffers = self._allocate(batch)
        return self._side_buffers

    def prefill(
        self, input_ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"],
        row_ids: Int[Tensor, " batch"], *, buffers: tuple[StaticCache, DraftState] | None = None,
        num_slots: int | None = None,
    ) -> tuple[
        SessionState, Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"]
    ]:  # fmt: skip
        """Read padded prompts; return the state, and the logits and scores of their first tokens.

        With `buffers` the prompts are read into these, not into the session's own rows. The target
        attends to the first `num_slots` of a row, by default to all.
        """
        policy = self.policy
        cache, draft_state = buffers or (self.cache, self.state)
        read_cache = cache if num_slots is None else cache.first_slots(num_slots)
        target_output, logits, scores, history = self._prefill(
            self.target, read_cache, self.layers, policy.sampling_rule, input_ids, lengths, row_ids
        )
        rows, draft_rows = self._open_slots(
            policy.sampling_rule, policy.lookahead, policy.max_moves, cache.garbage_slot, row_ids,
            lengths, scores, history,
        )  # fmt: skip
        proposal = None
        if self.draft is not None:
            draft_state, proposal = self._begin(
                self.draft, draft_state, policy, input_ids, draft_rows, target_output
            )
        state = SessionState(rows=rows, proposal=proposal, cache=cache, draft_state=draft_state)
        return state, logits, scores

    def insert(
        self, state: SessionState | None, prefilled: SessionState, row_numbers: Int[Tensor, " rows"]
    ) -> SessionState:
        """Return a state with prefilled rows at `row_numbers`; None stands for idle rows.

        The cache of the state is changed in place.
        """
        if state is None:
            idle = self._empty_like(
                {"rows": prefilled.rows, "proposal": prefilled.proposal}, self.batch
            )
            state = SessionState(**idle, cache=self.cache, draft_state=self.state)
        return self._scatter_rows(state, prefilled, row_numbers)

    def verify(
        self, state: SessionState
    ) -> tuple[TargetOutput, Float[Tensor, "batch verified vocab"]]:
        """Score the proposal; return the target's output and the logits after root and nodes."""
        return self._score(self.target, state.cache, self.layers, state.rows, state.proposal)

    def accept(
        self, state: SessionState, target_output: TargetOutput,
        logits: Float[Tensor, "batch verified vocab"],
    ) -> tuple[SessionState, RoundOutput]:  # fmt: skip
        """Accept one path of the proposal; return the state and the emitted tokens."""
        rows, output = self._accept(
            self.policy, state.cache.garbage_slot, state.rows, state.proposal, target_output, logits
        )
        return replace(state, rows=rows), output

    def commit(self, state: SessionState) -> SessionState:
        """Move the keys of the accepted path to their final slots; return the state."""
        if not self.policy.max_moves:
            return state
        return replace(state, rows=self._move(state.cache, state.rows))

    def propose(self, state: SessionState, output: RoundOutput) -> SessionState:
        """Advance the draft by the emitted tokens; return the state with its next proposal."""
        if self.draft is None:
            return state
        draft_state, proposal = self._draft_next(
            self.draft, state.draft_state, self.policy, state.rows, output
        )
        return replace(state, draft_state=draft_state, proposal=proposal)

    def run_round(
        self, state: SessionState, end_phase: Callable[[str], None] | None = None
    ) -> tuple[SessionState, RoundOutput]:
        """Run a round; return the state and the emitted tokens.

        The round is one graph. With `end_phase` it runs in parts, and `end_phase` is called with
        the name of each as it ends.
        """
        if end_phase is None:
            rows, output, draft_state, proposal = self._fused(
                self.target, state.cache, self.layers, self.policy, self.draft, state.draft_state,
                state.rows, state.proposal,
            )  # fmt: skip
            state = replace(state, rows=rows, draft_state=draft_state, proposal=proposal)
            return state, output
        target_output, logits = self.verify(state)
        end_phase("verify")
        state, output = self.accept(state, target_output, logits)
        end_phase("accept")
        state = self.commit(state)
        end_phase("cache_move")
        state = self.propose(state, output)
        end_phase("draft")
        return state, output
