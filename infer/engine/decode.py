"""The decoding loop: continuous batching of prompts over a fixed number of rows.

Prompts are prefilled alone or a few together, and scattered into free rows; then all rows go
through rounds together (infer/engine/rounds.py), however many tokens each of them accepts. The host
reads one small tensor a round. Autoregressive decoding is the same loop with an empty tree.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from infer.engine import rounds
from infer.engine.phase_timer import PhaseTimer
from infer.engine.rounds import DecodePolicy, RoundOutput, SlotState
from infer.engine.slots import allocate_slots, empty_like, scatter_rows
from infer.engine.stopping import StopCriteria
from infer.verify import AcceptanceRule, build_acceptance_rule
from infer.verify.base import Verification
from models.drafts.base import Draft, DraftState
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import NO_TREE, Proposal, Tree
from models.target.cache import StaticCache
from models.target.language_model import LanguageModel
from models.target.target import Target

NO_DRAFT = "alone"  # the kind of rounds without a draft
MIN_BUCKET = 64  # tokens; prompts are padded to the next power of two, each with its own graph
MIN_SCRATCH_SLOTS = 32  # slots that a round may use at least: see SLOT_ALIGNMENT
SLOT_ALIGNMENT = 32  # cache sizes are rounded up to it, so that different trees share graphs
# Arguments of target passes whose guards dynamo may skip. Two others identify them and are checked:
# the target's fingerprint and the cache's number of slots.
FROZEN_PREFIXES = ("target.decoder.", "cache.keys[", "cache.values[")

# called after each round with the verified tree, emitted ids [rows, depth + 1], their number [rows]
RoundCallback = Callable[[Proposal, Tensor, Tensor], None]
# returns up to so many of the waiting requests, and removes them from the queue
TakeRequests = Callable[[int], list["Request"]]


@dataclass(kw_only=True)
class Generation:
    """One row's answer, and what each round contributed to it.

    The first token comes from the prefill. `ids` is truncated at the end of the answer. `accepted`
    is not: it counts everything that verification accepted, also past the end.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # draft tokens of each round
    drafted: list[int] = field(default_factory=list)  # nodes proposed in each round
    prefill_s: float = 0.0  # until the first token is on the host
    round_s: list[float] = field(default_factory=list)
    round_share_s: list[float] = field(default_factory=list)  # round_s / active rows

    def add_round(self, ids: list[int], *, drafted: int, round_s: float, active_rows: int) -> None:
        """Append the tokens of a round that `active_rows` rows shared."""
        self.ids += ids
        self.accepted.append(len(ids) - 1)
        self.drafted.append(drafted)
        self.round_s.append(round_s)
        self.round_share_s.append(round_s / active_rows)

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def decoded_tokens(self) -> int:
        """Return the number of tokens that rounds added to the answer."""
        return len(self.ids) - 1

    @property
    def decode_s(self) -> float:
        return sum(self.round_s, 0.0)

    @property
    def e2e_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(kw_only=True)
class RoundTimer:
    """Seconds of the rounds of one call of `decode`; each counts once, whatever rows it served."""

    total_s: float = 0.0
    rounds: int = 0

    def add_round(self, round_s: float) -> None:
        self.total_s, self.rounds = self.total_s + round_s, self.rounds + 1


@dataclass(kw_only=True)
class EngineState:
    """The state that one round hands to the next."""

    slot_state: SlotState
    proposal: Proposal  # the tree that the next round verifies
    cache: StaticCache  # of the target
    draft_state: DraftState


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt and its answer so far."""

    ids: list[int]
    row_id: int  # keys the noise
    max_new_tokens: int
    generation: Generation = field(default_factory=Generation)
    finished: bool = False

    def truncate_if_finished(self, criteria: StopCriteria, *, num_new: int) -> None:
        """Cut the answer and finish the request if the last `num_new` tokens end it."""
        ids = self.generation.ids
        end = criteria.find_end(
            ids, num_checked=len(ids) - num_new, max_new_tokens=self.max_new_tokens
        )
        self.generation.ids = ids[:end]
        self.finished = end is not None


def bucket_length(length: int) -> int:
    """Return the length to which a prompt is padded: a power of two, to need few graphs."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def count_cache_slots(tree: Tree, slots: int) -> int:
    """Return the size of the caches: `slots`, a round's nodes, and tokens emitted past the end."""
    scratch = max(max(tree.size, tree.scratch_slots) + tree.max_path_length + 1, MIN_SCRATCH_SLOTS)
    return -(-(slots + scratch) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Decoder:
    """A decoding loop over one target, one draft and one tree shape, with caches of fixed size."""

    def __init__(
        self, target: LanguageModel, draft: Draft | None = None, tree: Tree = NO_TREE, *,
        sampling: SamplingConf, slots: int, batch: int = 1, layers: list[int] | None = None,
        acceptance_rule: AcceptanceRule | None = None, fused: bool | None = None,
    ):  # fmt: skip
        if draft is not None and tree.depth > draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {draft.max_depth} tokens that the draft can "
                f"propose, got {tree.depth}; lower tree.depth or raise draft.max_depth"
            )
        rule = acceptance_rule or build_acceptance_rule(Verification.auto, sampling)
        rule.check(sampling, tree)
        if draft is not None and tree.copied:
            draft = MixedDraft(draft)
        self.target, self.draft, self.tree = target, draft, tree
        self.batch, self.slots = batch, slots
        self.policy = DecodePolicy(
            sampling_rule=sampling.build(), acceptance_rule=rule, tree=tree,
            vocab_size=target.vocab_size,
        )  # fmt: skip
        self.depth, self.num_nodes = tree.max_path_length, tree.size
        # all modes of an evaluation capture the same layers, to share graphs and to cost the same
        self.layers = layers or (draft.needs.layers if draft else [])
        device = target.device
        self.torch_device, self.synchronize = device.torch_device, device.synchronize
        self.fused = device.fuses_rounds if fused is None else fused
        self.cache_slots = count_cache_slots(tree, slots)
        self._allocate_slots = device.compile_if_lazy(allocate_slots)
        self.cache, self.state = self._allocate(batch)
        # for prompts that are prefilled while other rows hold answers
        self._prefill_buffers: tuple[StaticCache, DraftState] | None = None
        self.round_timer = RoundTimer()
        # a Target's weights are frozen; those of a draft that writes texts of its own are not
        frozen = FROZEN_PREFIXES if isinstance(target, Target) else ()
        self._prefill = device.compile(rounds.prefill, frozen_names=frozen)
        self._open_slots = device.compile_if_lazy(rounds.open_slots)
        self._empty_like, self._scatter_rows = (
            device.compile_if_lazy(empty_like), device.compile_if_lazy(scatter_rows)
        )  # fmt: skip
        kind = draft.graph_kind if draft else NO_DRAFT
        self._begin = device.compile(rounds.begin, kind=kind)
        self._fused = device.compile(rounds.fused, frozen_names=frozen, kind=kind)
        self._score = device.compile(rounds.score, frozen_names=frozen)
        self._accept = device.compile(rounds.accept)
        self._move = device.compile(rounds.move)
        self._draft_next = device.compile(rounds.draft_next, kind=kind)

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[list[int]], *, row_ids: Sequence[int],
        max_new_tokens: int | Sequence[int], eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (), logits_out: list[Tensor] | None = None,
        on_round: RoundCallback | None = None, phase_timer: PhaseTimer | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Continue any number of prompts, `batch` at a time; the next takes a finished one's row.

        Answers are cut at `max_new_tokens`, after an EOS and after the token that completes a
        string of `stop`. `logits_out` collects the target's logits after each token, for batch 1.
        `on_round` is called after each round, and delays the next. With `phase_timer` rounds run
        unfused, and their phases are timed.
        """
        requests = list(self._make_requests(prompts, row_ids, max_new_tokens))
        waiting = iter(requests)
        finished = self.stream(
            lambda count: list(islice(waiting, count)), eos_ids=eos_ids, stop=stop,
            logits_out=logits_out, on_round=on_round, phase_timer=phase_timer,
        )  # fmt: skip
        deque(finished, maxlen=0)
        return [request.generation for request in requests]

    @torch.no_grad()
    def stream(
        self, take: TakeRequests, *, min_free_rows: int = 1, eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (), logits_out: list[Tensor] | None = None,
        on_round: RoundCallback | None = None, phase_timer: PhaseTimer | None = None,
    ) -> Iterator[Request]:  # fmt: skip
        """Decode the requests that `take` returns, yielding each as it ends, until there are none.

        `take` is called before every round; its prompts must fit in the slots. With dynamic shapes
        it is called with 0 until `min_free_rows` rows are free, to prefill that many together.
        """
        criteria = StopCriteria(
            eos_ids=frozenset(eos_ids or []), stop_strings=tuple(stop),
            detokenize=self._detokenize if stop else None,
        )  # fmt: skip
        running: dict[int, Request] = {}
        engine_state: EngineState | None = None
        self.round_timer = RoundTimer()
        while True:
            while requests := take(self._count_admissible(len(running), min_free_rows)):
                engine_state = self._admit_requests(engine_state, requests, running, criteria)
                yield from (request for request in requests if request.finished)
            if engine_state is None or not running:
                return
            start = time.perf_counter()
            if phase_timer is not None:
                phase_timer.start_round()
            active = [slot in running for slot in range(self.batch)]
            engine_state.slot_state.active = torch.tensor(active, device=self.torch_device)
            proposal = engine_state.proposal
            engine_state, output = self._run_round(engine_state, phase_timer)
            if on_round is not None:
                on_round(proposal, output.ids, output.count)
            host_rows = output.host_copy.tolist()  # the only read of the round
            round_s = time.perf_counter() - start
            self.round_timer.add_round(round_s)
            if logits_out is not None:
                logits_out.append(output.logits[0].cpu()[: host_rows[0][-1]])
            finished = self._distribute_tokens(host_rows, round_s, running, criteria)
            if phase_timer is not None:
                phase_timer.end_phase("host")
                phase_timer.finish_round(time.perf_counter() - start)
            yield from finished

    @torch.no_grad()
    def score_tokens(
        self, prompt: list[int], row_id: int, ids: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the target's logits and scores for the position of each of `ids`, read one by one.

        Sampling takes the argmax of the scores: logits, or warped logits plus noise. Requires a
        decoder without a draft and of one row.
        """
        queue = self._make_requests([prompt], [row_id], len(ids))
        engine_state, logits, scores = self._prefill_requests(list(queue), self.cache, self.state)
        yield logits[0], scores[0]
        for token in ids[:-1]:
            engine_state.slot_state.root = torch.full_like(engine_state.slot_state.root, token)
            engine_state, output = self._run_round(engine_state)
            yield output.logits[0, 0], output.scores[0, 0]

    def _distribute_tokens(
        self, host_rows: list[list[int]], round_s: float, running: dict[int, Request],
        criteria: StopCriteria,
    ) -> list[Request]:  # fmt: skip
        """Append a round's tokens to each running request; remove and return the finished ones."""
        active = list(running.items())
        for slot, request in active:
            *tokens, count = host_rows[slot]
            request.generation.add_round(
                tokens[:count], drafted=self.num_nodes, round_s=round_s, active_rows=len(active)
            )
            request.truncate_if_finished(criteria, num_new=count)
            if request.finished:
                del running[slot]
        return [request for _, request in active if request.finished]

    # --- rounds -------------------------------------------------------------------------------

    def _run_round(
        self, engine_state: EngineState, phase_timer: PhaseTimer | None = None
    ) -> tuple[EngineState, RoundOutput]:
        rows, proposal, cache, state = (engine_state.slot_state, engine_state.proposal,
                                        engine_state.cache, engine_state.draft_state)  # fmt: skip
        if self.fused and phase_timer is None:
            rows, output, state, proposal = self._fused(
                self.target, cache, self.layers, self.policy, self.draft, state, rows, proposal
            )
            return EngineState(slot_state=rows, proposal=proposal, cache=cache,
                               draft_state=state), output  # fmt: skip
        end_phase = phase_timer.end_phase if phase_timer else _skip_timing
        target_output, logits = self._score(self.target, cache, self.layers, rows, proposal)
        end_phase("verify")
        rows, output = self._accept(
            self.policy, cache.garbage_slot, rows, proposal, target_output, logits
        )
        end_phase("accept")
        if self.policy.max_moves:
            rows = self._move(cache, rows)
        end_phase("cache_move")
        if self.draft is not None:
            state, proposal = self._draft_next(self.draft, state, self.policy, rows, output)
        end_phase("draft")
        return EngineState(slot_state=rows, proposal=proposal, cache=cache,
                           draft_state=state), output  # fmt: skip

    # --- prompts ------------------------------------------------------------------------------

    def _make_requests(
        self, prompts: Sequence[list[int]], row_ids: Sequence[int], limits: int | Sequence[int]
    ) -> Iterator[Request]:
        by_row = [limits] * len(prompts) if isinstance(limits, int) else limits
        for index, (ids, row_id, limit) in enumerate(zip(prompts, row_ids, by_row, strict=True)):
            if not ids:
                raise UserError(
                    f"evaluation.prompts: every prompt needs a token, got none for number {index}; "
                    "begin it with the tokenizer's BOS"
                )
            if len(ids) + limit > self.slots:
                raise UserError(
                    f"evaluation.max_new_tokens: prompt and answer must fit in {self.slots} "
                    f"tokens, got {len(ids)} + {limit}; shorten the prompts"
                )
            yield Request(ids=ids, row_id=row_id, max_new_tokens=limit)

    def _count_admissible(self, num_running: int, min_free_rows: int) -> int:
        """Return how many prompts to prefill next: 1 with static shapes, to need fewer graphs.

        With dynamic shapes all free rows, once `min_free_rows` are free or no row is running.
        """
        free = self.batch - num_running
        if self.target.device.has_static_shapes:
            return min(free, 1)
        return free if free >= min_free_rows or not num_running else 0

    def _admit_requests(
        self, engine_state: EngineState | None, requests: list[Request],
        running: dict[int, Request], criteria: StopCriteria,
    ) -> EngineState:  # fmt: skip
        """Prefill the prompts of `requests` and put them in free rows."""
        start = time.perf_counter()
        free = [slot for slot in range(self.batch) if slot not in running][: len(requests)]
        if not running and (self.batch == 1 or not self.target.device.has_static_shapes):
            next_state, _, _ = self._prefill_requests(requests, self.cache, self.state)
        else:
            if (self._prefill_buffers is None
                    or len(self._prefill_buffers[0].positions) != len(requests)):  # fmt: skip
                self._prefill_buffers = self._allocate(len(requests))
            prefilled, _, _ = self._prefill_requests(requests, *self._prefill_buffers)
            slots = torch.tensor(free, device=self.torch_device)
            next_state = cast(EngineState, self._scatter_rows(
                engine_state or self._make_idle_state(prefilled), prefilled, slots
            ))  # fmt: skip
        first_tokens = next_state.slot_state.root.tolist()
        prefill_s = time.perf_counter() - start
        for slot, request in zip(free, requests, strict=True):
            request.generation.ids, request.generation.prefill_s = [first_tokens[slot]], prefill_s
            request.truncate_if_finished(criteria, num_new=1)
            if not request.finished:
                running[slot] = request
        return next_state

    def _make_idle_state(self, prefilled: EngineState) -> EngineState:
        """Return idle rows, of the shapes of `prefilled` but for the batch."""
        rows, proposal = self._empty_like((prefilled.slot_state, prefilled.proposal), self.batch)
        return EngineState(
            slot_state=rows, proposal=proposal, cache=self.cache, draft_state=self.state
        )

    def _prefill_requests(
        self, requests: list[Request], cache: StaticCache, state: DraftState
    ) -> tuple[EngineState, Tensor, Tensor]:
        """Prefill prompts into the first slots; return also their first tokens' logits, scores."""
        batch = len(cache.positions)
        longest = max(len(request.ids) for request in requests)
        padded = torch.zeros(batch, min(bucket_length(longest), self.slots), dtype=torch.int64)
        lengths, row_ids = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
        for i, request in enumerate(requests):
            padded[i, : len(request.ids)] = torch.tensor(request.ids)
            lengths[i], row_ids[i] = len(request.ids), request.row_id
        input_ids, lengths, row_ids = (x.to(self.torch_device) for x in (padded, lengths, row_ids))
        target_output, logits, scores, history = self._prefill(
            self.target, cache, self.layers, self.policy.sampling_rule, input_ids, lengths, row_ids
        )
        policy = self.policy
        rows, draft_rows, proposal = self._open_slots(
            policy.sampling_rule, policy.lookahead, policy.max_moves, cache.garbage_slot, row_ids,
            lengths, scores, history,
        )  # fmt: skip
        if self.draft is not None:
            state, proposal = self._begin(
                self.draft, state, self.policy, input_ids, draft_rows, target_output
            )
        return (
            EngineState(slot_state=rows, proposal=proposal, cache=cache, draft_state=state),
            logits, scores,
        )  # fmt: skip

    def _allocate(self, batch: int) -> tuple[StaticCache, DraftState]:
        return self._allocate_slots(self.target, self.draft, batch, self.cache_slots)

    def _detokenize(self, ids: list[int]) -> str:
        assert isinstance(self.target, Target)
        return self.target.tokenizer.decode(ids)


def _skip_timing(phase: str) -> None:
    """Stand in for PhaseTimer.end_phase in untimed rounds."""
