"""The decoding loop: rows of prompts in fixed slots, each finished one replaced by the next prompt.

A prompt is read alone and its row put in place; then all rows go through rounds together
(infer/rounds.py), however many tokens each of them accepts. The host reads one small tensor a
round. Autoregressive decoding is the same loop with an empty tree.

Axes: B rows, P padded prompt, N nodes, D deepest node.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from infer import rounds
from infer.laps import Laps
from infer.room import blank, put, room
from infer.rounds import Plan, Round, Rows
from infer.stopping import Stopping
from infer.verify import Verifier, build
from infer.verify.base import Verification
from models.cache import StaticCache
from models.drafts.base import Draft, State
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.sampling import SamplingConf
from models.target import Target
from models.transformer import Transformer
from models.tree import NO_TREE, Proposal, Tree

ALONE = "alone"  # the kind of rounds without a draft
SMALLEST_BUCKET = 64  # tokens; prompts are padded to the next power of two: one graph each
SMALLEST_SCRATCH = 32  # slots that a round may use at least: see SLOTS_STEP
SLOTS_STEP = 32  # caches are rounded up to it, so that decoders of different trees share graphs
# Parts of the arguments of target passes. Two others tell which they are, and are checked: the
# target's fingerprint and the cache's number of slots.
SETTLED = ("target.decoder.", "cache.keys[", "cache.values[")

# told of each round: the tree that was verified, the emitted ids [B, D+1], how many of them [B]
Watch = Callable[[Proposal, Tensor, Tensor], None]


@dataclass(kw_only=True)
class Decoded:
    """One row's answer, and what each round was worth."""

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # draft tokens of each round
    drafted: list[int] = field(default_factory=list)  # nodes proposed in each round
    prefill_s: float = 0.0  # until the first token is on the host
    round_s: list[float] = field(default_factory=list)
    share_s: list[float] = field(default_factory=list)  # of a round, which all rows at work share

    def emit(self, ids: list[int], *, drafted: int, took: float, rows: int) -> None:
        """What a round with so many rows at work gave."""
        self.ids += ids
        self.accepted.append(len(ids) - 1)
        self.drafted.append(drafted)
        self.round_s.append(took)
        self.share_s.append(took / rows)


@dataclass(kw_only=True)
class Spent:
    """Seconds of the rounds of one call of `decode`; one counts once, whatever rows it served."""

    round_s: float = 0.0
    rounds: int = 0

    def count(self, round_s: float) -> None:
        self.round_s, self.rounds = self.round_s + round_s, self.rounds + 1


@dataclass(kw_only=True)
class Work:
    """All that a round goes on from."""

    rows: Rows
    proposal: Proposal  # what it will verify
    cache: StaticCache  # of the target
    state: State  # of the draft


@dataclass(kw_only=True)
class _Request:
    ids: list[int]
    row_id: int
    limit: int
    answer: Decoded

    def ended(self, stopping: Stopping, *, new: int) -> bool:
        """Whether the answer is whole by its `new` last tokens; then it is cut."""
        ids = self.answer.ids
        end = stopping.end(ids, known=len(ids) - new, limit=self.limit)
        self.answer.ids = ids[:end]
        return end is not None


def bucket(length: int) -> int:
    """The padded length at which a prompt is read: a power of two, so that few graphs do."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def held_slots(tree: Tree, slots: int) -> int:
    """Of the caches: behind the last token a round's nodes, and what it emits beyond the end."""
    scratch = max(max(tree.size, tree.scratch) + tree.deepest + 1, SMALLEST_SCRATCH)
    return -(-(slots + scratch) // SLOTS_STEP) * SLOTS_STEP


class Decoder:
    """Decodes prompts with one target, one draft and one tree shape, in a fixed number of slots."""

    def __init__(
        self, target: Transformer, draft: Draft | None = None, tree: Tree = NO_TREE, *,
        sampling: SamplingConf, slots: int, batch: int = 1, layers: list[int] | None = None,
        verification: Verifier | None = None, fused: bool | None = None,
    ):  # fmt: skip
        if draft is not None and tree.depth > draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {draft.max_depth} tokens that the draft can "
                f"propose, got {tree.depth}; lower tree.depth or raise draft.max_depth"
            )
        verifier = verification or build(Verification.auto, sampling)
        verifier.check(sampling, tree)
        if draft is not None and tree.copied:
            draft = MixedDraft(draft)
        self.target, self.draft, self.tree = target, draft, tree
        self.batch, self.slots = batch, slots
        self.plan = Plan(
            rule=sampling.build(), verifier=verifier, tree=tree, vocab=target.vocab_size
        )
        self.depth, self.nodes = tree.deepest, tree.size
        # all modes of an evaluation capture the same layers: they share graphs, none runs lighter
        self.layers = layers or (draft.needs.layers if draft else [])
        device = target.device
        self.place, self.synchronize = device.torch_device, device.synchronize
        self.fused = device.fuses if fused is None else fused
        self.held = held_slots(tree, slots)
        self._make_room = device.glue(room)
        self.cache, self.state = self._room(batch)
        self._alone: tuple[StaticCache, State] | None = None  # room to read one prompt beside them
        self.spent = Spent()
        # a target does not change; a draft that writes texts of its own does
        settled = SETTLED if isinstance(target, Target) else ()
        self._prefill = device.compile(rounds.prefill, settled=settled)
        self._open = device.glue(rounds.opened)
        self._blank, self._put = device.glue(blank), device.glue(put)
        kind = draft.kind if draft else ALONE
        self._begin = device.compile(rounds.begin, kind=kind)
        self._fused = device.compile(rounds.fused, settled=settled, kind=kind)
        self._score = device.compile(rounds.score, settled=settled)
        self._accept = device.compile(rounds.accept)
        self._move = device.compile(rounds.move)
        self._go_on = device.compile(rounds.go_on, kind=kind)

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[list[int]], *, row_ids: Sequence[int],
        max_new_tokens: int | Sequence[int], eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (), record: list[Tensor] | None = None, watch: Watch | None = None,
        laps: Laps | None = None,
    ) -> list[Decoded]:  # fmt: skip
        """Continue any number of prompts, `batch` at a time; a row that ends makes room.

        Answers are cut at `max_new_tokens`, behind an EOS and behind the token that completes one
        of the `stop` strings. `record` collects the target's logits behind each emitted token, for
        batch 1; `watch` sees every round, at the cost of waiting for it; `laps` times the parts of
        unfused rounds.
        """
        asked = list(self._requests(prompts, row_ids, max_new_tokens))
        waiting = deque(asked)
        stopping = Stopping(
            eos_ids=frozenset(eos_ids or []), strings=tuple(stop), text=self._text if stop else None
        )
        busy: dict[int, _Request] = {}
        work: Work | None = None
        self.spent = Spent()
        while waiting or busy:
            work = self._admit(work, waiting, busy, stopping)
            if not busy:
                continue
            began = time.perf_counter()
            if laps is not None:
                laps.start()
            active = [slot in busy for slot in range(self.batch)]
            work.rows.active = torch.tensor(active, device=self.place)
            tree = work.proposal
            work, emitted = self._round(work, laps)
            if watch is not None:
                watch(tree, emitted.ids, emitted.count)
            told = emitted.told.tolist()  # the one read of the round
            took = time.perf_counter() - began
            self.spent.count(took)
            if record is not None:
                record.append(emitted.logits[0].cpu()[: told[0][-1]])
            at_work = list(busy.items())
            for slot, request in at_work:
                *tokens, number = told[slot]
                request.answer.emit(
                    tokens[:number], drafted=self.nodes, took=took, rows=len(at_work)
                )
                if request.ended(stopping, new=number):
                    del busy[slot]
            if laps is not None:
                laps.lap("host")
                laps.finish(time.perf_counter() - began)
        return [request.answer for request in asked]

    @torch.no_grad()
    def forced(self, prompt: list[int], row_id: int, ids: list[int]) -> Iterator[Tensor]:
        """The target's scores of the place of each of `ids`, read one token at a time.

        Scores are what the rule takes the largest of: logits, or warped logits plus noise. For a
        decoder without a draft, of one row.
        """
        asked = self._requests([prompt], [row_id], len(ids))
        work, scores = self._read(list(asked), self.cache, self.state)
        yield scores[0]
        for token in ids[:-1]:
            work.rows.root = torch.full_like(work.rows.root, token)
            work, emitted = self._round(work)
            yield emitted.scores[0, 0]

    # --- rounds -------------------------------------------------------------------------------

    def _round(self, work: Work, laps: Laps | None = None) -> tuple[Work, Round]:
        rows, proposal, cache, state = work.rows, work.proposal, work.cache, work.state
        if self.fused and laps is None:
            rows, emitted, state, proposal = self._fused(
                self.target, cache, self.layers, self.plan, self.draft, state, rows, proposal
            )
            return Work(rows=rows, proposal=proposal, cache=cache, state=state), emitted
        lap = laps.lap if laps else _no_lap
        seen, logits = self._score(self.target, cache, self.layers, rows, proposal)
        lap("verify")
        rows, emitted = self._accept(self.plan, cache.garbage, rows, proposal, seen, logits)
        lap("accept")
        if self.plan.moved:
            rows = self._move(cache, rows)
        lap("cache_move")
        if self.draft is not None:
            state, proposal = self._go_on(self.draft, state, self.plan, rows, emitted)
        lap("draft")
        return Work(rows=rows, proposal=proposal, cache=cache, state=state), emitted

    # --- prompts ------------------------------------------------------------------------------

    def _requests(
        self, prompts: Sequence[list[int]], row_ids: Sequence[int], limits: int | Sequence[int]
    ) -> Iterator[_Request]:
        each = [limits] * len(prompts) if isinstance(limits, int) else limits
        for place, (ids, row_id, limit) in enumerate(zip(prompts, row_ids, each, strict=True)):
            if not ids:
                raise UserError(
                    f"evaluation.prompts: every prompt needs a token, got none for number {place}; "
                    "begin it with the tokenizer's BOS"
                )
            if len(ids) + limit > self.slots:
                raise UserError(
                    f"evaluation.max_new_tokens: prompt and answer must fit in {self.slots} "
                    f"tokens, got {len(ids)} + {limit}; shorten the prompts"
                )
            yield _Request(ids=ids, row_id=row_id, limit=limit, answer=Decoded())

    def _admit(
        self, work: Work | None, waiting: deque[_Request], busy: dict[int, _Request],
        stopping: Stopping,
    ) -> Work:  # fmt: skip
        """Prompts for the free slots, one by one: a graph a prompt length, whatever the batch is.

        Where shapes are free, and no row is at work, all at once.
        """
        together = self.batch == 1 or not self.target.device.static
        while waiting and len(busy) < self.batch:
            began = time.perf_counter()
            free = [slot for slot in range(self.batch) if slot not in busy]
            if together and not busy:
                some = [waiting.popleft() for _ in range(min(self.batch, len(waiting)))]
                work, _ = self._read(some, self.cache, self.state)
                first = work.rows.root.tolist()
            else:
                some = [waiting.popleft()]
                self._alone = self._alone or self._room(1)
                one, _ = self._read(some, *self._alone)
                if work is None:  # rows that have not begun, of the shapes of one that has
                    rows, proposal = self._blank((one.rows, one.proposal), self.batch)
                    work = replace(one, rows=rows, proposal=proposal, cache=self.cache,
                                   state=self.state)  # fmt: skip
                work = self._put(work, one, torch.tensor(free[:1], device=self.place))
                first = one.rows.root.tolist()
            took = time.perf_counter() - began
            for slot, request, token in zip(free, some, first, strict=False):
                request.answer.ids, request.answer.prefill_s = [token], took
                if not request.ended(stopping, new=1):
                    busy[slot] = request
        assert work is not None
        return work

    def _read(
        self, requests: list[_Request], cache: StaticCache, state: State
    ) -> tuple[Work, Tensor]:
        """Prompts from the first slot on, and the scores of their first tokens."""
        count = len(cache.positions)
        longest = max(len(request.ids) for request in requests)
        padded = torch.zeros(count, min(bucket(longest), self.slots), dtype=torch.int64)
        lengths, keys = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
        for i, request in enumerate(requests):
            padded[i, : len(request.ids)] = torch.tensor(request.ids)
            lengths[i], keys[i] = len(request.ids), request.row_id
        ids, lengths, keys = (part.to(self.place) for part in (padded, lengths, keys))
        seen, scores, history = self._prefill(
            self.target, cache, self.layers, self.plan.rule, ids, lengths, keys
        )
        plan = self.plan
        rows, told, proposal = self._open(
            plan.rule, plan.ahead, plan.moved, cache.garbage, keys, lengths, scores, history
        )
        if self.draft is not None:
            state, proposal = self._begin(self.draft, state, self.plan, ids, told, seen)
        return Work(rows=rows, proposal=proposal, cache=cache, state=state), scores

    def _room(self, batch: int) -> tuple[StaticCache, State]:
        return self._make_room(self.target, self.draft, batch, self.held)

    def _text(self, ids: list[int]) -> str:
        assert isinstance(self.target, Target)
        return self.target.tokenizer.decode(ids)


def _no_lap(part: str) -> None:
    """Rounds that nobody times."""
