"""A decoding session: a program over fixed rows, its buffers and its compiled steps.

    prefill, start_rows, begin         the draft makes its first proposals
    verify                             the target scores a proposal          }
    accept                             one path of it is emitted             }  a round, which `run_round`
    cache_move                         keys move; fused, in the next verify  }  fuses into one graph unless
    draft                              the draft makes the next proposal     }  its parts are timed

Sessions of equal shapes share graphs, because the steps are functions of tensors (infer/engine/steps.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from weakref import WeakKeyDictionary

from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from infer.engine import steps
from infer.engine.recorded_rounds import RecordedRounds
from infer.engine.row_tensors import allocate_slots, empty_like, scatter_rows
from infer.engine.steps import Program, RoundOutput, SessionState
from models.device.graph_budget import mark_any_size
from models.drafts.base import DraftState
from models.targets.cache import StaticCache
from models.targets.target import WEIGHT_NAMES, Target

NO_DRAFT = "alone"  # the kind of rounds without a draft
MIN_SCRATCH_SLOTS = 32  # least number of slots kept for a round: see SLOT_ALIGNMENT
VIEW_ALIGNMENT = 64  # slots; rounds read views of multiples of it
MIN_VIEWED_SLOTS = 512  # of a cache; rounds read shorter caches whole, which takes less time by the call
SLOT_ALIGNMENT = 32  # cache sizes are rounded up to it, so that different trees share graphs
# Arguments of target passes whose guards dynamo may skip: it checks what identifies them, the target's
# fingerprint (see the assert in Target.forward_hidden) and the cache's numbers of slots (_guard_on_slots of steps.py).
FROZEN_PREFIXES = (
    *(f"program.{name}" for name in WEIGHT_NAMES),
    "cache.keys[",
    "cache.values[",
    "state.cache.keys[",
    "state.cache.values[",
)
# Parts of the arguments that steps do not read: the budget of graphs leaves them out of a call's shape.
UNREAD_POLICY = ("program.tree", "program.acceptance_rule")
UNREAD_BY_PREFILL = ("program.draft", *UNREAD_POLICY)
UNREAD_BY_VERIFY = ("program.draft", *UNREAD_POLICY, "program.sampling", "state.draft_state")
UNREAD_BY_ACCEPT = ("program.target", "program.draft", "state.draft_state")
UNREAD_BY_MOVE = ("state.draft_state", "state.proposal")
UNREAD_BY_DRAFT = ("program.target", "state.cache")

Buffers = tuple[StaticCache, DraftState]
ChangeState = Callable[[SessionState], SessionState]


class Session:
    """A program over `batch` rows of at most `slots` tokens; they take memory on the first use."""

    def __init__(self, program: Program, *, slots: int, batch: int):
        self.program, self.slots, self.batch = program, slots, batch
        target, draft = program.target, program.draft
        device = self.device = target.device
        self._allocate_slots = device.compile_if_lazy(allocate_slots)
        self._start_rows = device.compile_if_lazy(steps.start_rows)
        self._empty_like = device.compile_if_lazy(empty_like)
        self._scatter_rows = device.compile_if_lazy(scatter_rows)
        # A Target's weights are frozen; those of a draft that generates text in its place are not.
        frozen = FROZEN_PREFIXES if isinstance(target, Target) else ()
        models = [target.model] if draft is None else [target.model, draft]
        if isinstance(target, Target):
            for model in models:
                device.pack_weights(model)
        kind = self.kind = draft.graph_kind if draft else NO_DRAFT
        self._prefill = device.compile(steps.prefill, frozen_names=frozen, unread=UNREAD_BY_PREFILL)
        self._begin = device.compile(steps.begin, kind=kind, unread=UNREAD_BY_DRAFT)
        fused = device.compile(steps.fused, frozen_names=frozen, kind=kind)
        self._fused = RecordedRounds(device, fused) if device.records_rounds else fused
        self._verify = device.compile(steps.verify, frozen_names=frozen, unread=UNREAD_BY_VERIFY)
        self._accept = device.compile(steps.accept, unread=UNREAD_BY_ACCEPT)
        self._cache_move = device.compile(steps.cache_move, unread=UNREAD_BY_MOVE)
        self._draft = device.compile(steps.draft, kind=kind, unread=UNREAD_BY_DRAFT)
        self._side_buffers: Buffers | None = None
        self._views: WeakKeyDictionary[StaticCache, dict[tuple[int, bool], StaticCache]] = WeakKeyDictionary()
        # Graphs that take a view of a cache were tried on CPUs alone.
        self.reads_views = device.name == "cpu" or not device.has_static_shapes
        self.reads_any_length = all(map(device.can_read_any_length, models))  # in one graph, after weights are packed

    @property
    def cache_slots(self) -> int:
        """Return the size of the caches: `slots`, a round's nodes, and tokens emitted past the end, aligned."""
        slots = self.slots + max(self.program.tree.round_slots, MIN_SCRATCH_SLOTS)
        return -(-slots // SLOT_ALIGNMENT) * SLOT_ALIGNMENT  # rounded up

    @cached_property
    def buffers(self) -> Buffers:
        """Return the target's cache and the draft's state of the session's own rows."""
        return self._allocate(self.batch)

    def _allocate(self, batch: int) -> Buffers:
        return self._allocate_slots(self.program.target, self.program.draft, batch, self.cache_slots)

    def side_buffers(self, batch: int) -> Buffers:
        """Return buffers to prefill prompts in while the session's rows hold answers, reused by `batch`."""
        if self._side_buffers is None or self._side_buffers[0].batch != batch:
            self._side_buffers = self._allocate(batch)
        return self._side_buffers

    def start_prompts(
        self,
        input_ids: Int[Tensor, "batch prompt"],
        lengths: Int[Tensor, " batch"],
        row_limbs: Int[Tensor, "batch limbs"],
        *,
        buffers: Buffers | None = None,
        num_slots: int | None = None,
    ) -> tuple[SessionState, Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"]]:
        """Read padded prompts; return the state, and the logits and scores of their first tokens.

        With `buffers` the prompts are read into these, not into the session's own rows. Target and draft
        attend to the first `num_slots` of a row, by default to all.
        """
        program = self.program
        cache, draft_state = buffers or self.buffers
        any_length = self.reads_any_length
        read_cache = cache if num_slots is None else self._first_slots(cache, num_slots, any_length=any_length)
        if any_length:
            mark_any_size(input_ids, 1)
        target_output, logits, scores, history = self._prefill(program, read_cache, input_ids, lengths, row_limbs)
        rows = self._start_rows(
            program.sampling, program.lookahead, program.max_moves, row_limbs, lengths, scores, history
        )
        state = SessionState(rows=rows, proposal=None, cache=cache, draft_state=draft_state)
        if program.draft is not None:
            if any_length:
                target_output.map_tensors(lambda tensor: mark_any_size(tensor, 1))
            # A draft that is a language model also reads the first new token, and the nodes of its first tree.
            needed = num_slots and min(num_slots + program.tree.round_slots, self.cache_slots)
            narrow, widen = self._narrow_and_widen(needed, any_length=any_length)
            state = widen(self._begin(program, narrow(state), input_ids, target_output))
        return state, logits, scores

    def insert(
        self, state: SessionState | None, prefilled: SessionState, row_numbers: Int[Tensor, " rows"]
    ) -> SessionState:
        """Return a state with prefilled rows at `row_numbers`, its cache changed in place; None: idle rows."""
        if state is None:
            idle = self._empty_like({"rows": prefilled.rows, "proposal": prefilled.proposal}, self.batch)
            cache, draft_state = self.buffers
            state = SessionState(**idle, cache=cache, draft_state=draft_state)
        return self._scatter_rows(state, prefilled, row_numbers)

    def run_round(
        self, state: SessionState, end_phase: Callable[[str], None] | None = None, *, longest: int
    ) -> tuple[SessionState, RoundOutput]:
        """Run a round; return the state and the emitted tokens.

        The round is one graph. With `end_phase` it runs in parts, and `end_phase` is called with the name of
        each as it ends. State and output are valid until the next round. No active row has more than `longest`
        tokens: later slots of the target's cache, and of a draft model's, are not read.
        """
        if not self.reads_views or self.cache_slots < MIN_VIEWED_SLOTS:
            return self._run_round(state, end_phase)
        needed = -(-(longest + self.program.tree.round_slots) // VIEW_ALIGNMENT) * VIEW_ALIGNMENT  # rounded up
        any_length = self.device.has_static_shapes
        narrow, widen = self._narrow_and_widen(min(needed, self.cache_slots), any_length=any_length)
        state, output = self._run_round(narrow(state), end_phase)
        return widen(state), output

    def _narrow_and_widen(self, count: int | None, *, any_length: bool) -> tuple[ChangeState, ChangeState]:
        """Return what replaces the caches of a state by views of `count` slots, by default all, and what undoes it."""
        wholes: dict[StaticCache, StaticCache] = {}

        def narrow(cache: StaticCache) -> StaticCache:
            view = cache if count is None else self._first_slots(cache, count, any_length=any_length)
            wholes[view] = cache
            return view

        return lambda state: _map_caches(state, narrow), lambda state: _map_caches(state, wholes.__getitem__)

    def _first_slots(self, cache: StaticCache, count: int, *, any_length: bool) -> StaticCache:
        """Return a view of a cache; where graphs look caches up by identity, the same one in each call."""
        if not self.device.has_static_shapes:
            return cache.first_slots(count)
        views = self._views.setdefault(cache, {})
        if (count, any_length) not in views:
            views[count, any_length] = cache.first_slots(count, any_length=any_length)
        return views[count, any_length]

    def _run_round(
        self, state: SessionState, end_phase: Callable[[str], None] | None
    ) -> tuple[SessionState, RoundOutput]:
        if end_phase is None:
            return self._fused(self.program, state)
        target_output, logits = self._verify(self.program, state)
        end_phase("verify")
        state, output = self._accept(self.program, state, target_output, logits)
        end_phase("accept")
        if self.program.max_moves:
            state = self._cache_move(state)
        end_phase("cache_move")
        if self.program.draft is not None:
            state = self._draft(self.program, state, output)
        end_phase("draft")
        return state, output


def _map_caches(state: SessionState, change: Callable[[StaticCache], StaticCache]) -> SessionState:
    """Return a state with the caches of the target, and of a draft that is a language model, changed."""
    cache, draft_state = tree_map_only(StaticCache, change, (state.cache, state.draft_state))
    return replace(state, cache=cache, draft_state=draft_state)
