"""The decoding loop: rows of prompts in fixed slots, each finished one replaced by the next prompt.

A prompt is read alone, or a few are together, and its row put in place; then all rows go through
rounds together (infer/engine/rounds.py), however many tokens each of them accepts. The host reads
one small tensor a round. Autoregressive decoding is the same loop with an empty tree.

Axes: B rows, P padded prompt, N nodes, D deepest node.
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
from infer.engine.phase_timer import Laps
from infer.engine.rounds import Plan, Round, Rows
from infer.engine.slots import blank, put, room
from infer.engine.stopping import Stopping
from infer.verify import Verifier, build
from infer.verify.base import Verification
from models.drafts.base import Draft, State
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import NO_TREE, Proposal, Tree
from models.target.cache import StaticCache
from models.target.language_model import Transformer
from models.target.target import Target

ALONE = "alone"  # the kind of rounds without a draft
SMALLEST_BUCKET = 64  # tokens; prompts are padded to the next power of two: one graph each
SMALLEST_SCRATCH = 32  # slots that a round may use at least: see SLOTS_STEP
SLOTS_STEP = 32  # caches are rounded up to it, so that decoders of different trees share graphs
# Parts of the arguments of target passes. Two others tell which they are, and are checked: the
# target's fingerprint and the cache's number of slots.
SETTLED = ("target.decoder.", "cache.keys[", "cache.values[")

# told of each round: the tree that was verified, the emitted ids [B, D+1], how many of them [B]
Watch = Callable[[Proposal, Tensor, Tensor], None]
# gives so many of the requests that wait, or fewer where there are not as many
Take = Callable[[int], list["Request"]]


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


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt, and its answer as far as it goes."""

    ids: list[int]
    row_id: int  # keys the noise
    limit: int  # new tokens
    answer: Decoded = field(default_factory=Decoded)
    ended: bool = False

    def check_end(self, stopping: Stopping, *, new: int) -> None:
        """Cut the answer if it is whole by its `new` last tokens."""
        ids = self.answer.ids
        end = stopping.end(ids, known=len(ids) - new, limit=self.limit)
        self.answer.ids = ids[:end]
        self.ended = end is not None


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
        self._beside: tuple[StaticCache, State] | None = None  # room to read prompts beside others
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
        waiting = iter(asked)
        done = self.stream(
            lambda most: list(islice(waiting, most)), eos_ids=eos_ids, stop=stop, record=record,
            watch=watch, laps=laps,
        )  # fmt: skip
        deque(done, maxlen=0)
        return [request.answer for request in asked]

    @torch.no_grad()
    def stream(
        self, take: Take, *, least: int = 1, eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (), record: list[Tensor] | None = None, watch: Watch | None = None,
        laps: Laps | None = None,
    ) -> Iterator[Request]:  # fmt: skip
        """Continue what `take` gives, each request yielded as it ends, until there is no more.

        `take` is asked before every round, as soon as `least` rows are free: where shapes are free,
        so many prompts are read together. What it gives must fit in the slots.
        """
        stopping = Stopping(
            eos_ids=frozenset(eos_ids or []), strings=tuple(stop), text=self._text if stop else None
        )
        busy: dict[int, Request] = {}
        work: Work | None = None
        self.spent = Spent()
        while True:
            while some := take(self._wanted(len(busy), least)):
                work = self._admit(work, some, busy, stopping)
                yield from (request for request in some if request.ended)
            if work is None or not busy:
                return
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
            ended = self._hand_out(told, took, busy, stopping)
            if laps is not None:
                laps.lap("host")
                laps.finish(time.perf_counter() - began)
            yield from ended

    @torch.no_grad()
    def forced(
        self, prompt: list[int], row_id: int, ids: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The target's logits and scores of the place of each of `ids`, read one token at a time.

        Scores are what the rule takes the largest of: logits, or warped logits plus noise. For a
        decoder without a draft, of one row.
        """
        asked = self._requests([prompt], [row_id], len(ids))
        work, logits, scores = self._read(list(asked), self.cache, self.state)
        yield logits[0], scores[0]
        for token in ids[:-1]:
            work.rows.root = torch.full_like(work.rows.root, token)
            work, emitted = self._round(work)
            yield emitted.logits[0, 0], emitted.scores[0, 0]

    def _hand_out(
        self, told: list[list[int]], took: float, busy: dict[int, Request], stopping: Stopping
    ) -> list[Request]:
        """Give each row what a round emitted for it; those that ended make room."""
        at_work = list(busy.items())
        for slot, request in at_work:
            *tokens, number = told[slot]
            request.answer.emit(tokens[:number], drafted=self.nodes, took=took, rows=len(at_work))
            request.check_end(stopping, new=number)
            if request.ended:
                del busy[slot]
        return [request for _, request in at_work if request.ended]

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
    ) -> Iterator[Request]:
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
            yield Request(ids=ids, row_id=row_id, limit=limit)

    def _wanted(self, at_work: int, least: int) -> int:
        """How many prompts are read next: one, for a graph a prompt length whatever the batch is.

        Where shapes are free, as many as rows are, once they are `least` or nobody is at work.
        """
        free = self.batch - at_work
        if self.target.device.static:
            return min(free, 1)
        return free if free >= least or not at_work else 0

    def _admit(
        self, work: Work | None, some: list[Request], busy: dict[int, Request], stopping: Stopping
    ) -> Work:
        """Read prompts and give them free slots."""
        began = time.perf_counter()
        free = [slot for slot in range(self.batch) if slot not in busy][: len(some)]
        if not busy and (self.batch == 1 or not self.target.device.static):
            begun, _, _ = self._read(some, self.cache, self.state)
        else:
            if self._beside is None or len(self._beside[0].positions) != len(some):
                self._beside = self._room(len(some))
            read, _, _ = self._read(some, *self._beside)
            slots = torch.tensor(free, device=self.place)
            begun = cast(Work, self._put(work or self._idle(read), read, slots))
        first = begun.rows.root.tolist()
        took = time.perf_counter() - began
        for slot, request in zip(free, some, strict=True):
            request.answer.ids, request.answer.prefill_s = [first[slot]], took
            request.check_end(stopping, new=1)
            if not request.ended:
                busy[slot] = request
        return begun

    def _idle(self, read: Work) -> Work:
        """Rows that have not begun, of the shapes of those that have."""
        rows, proposal = self._blank((read.rows, read.proposal), self.batch)
        return Work(rows=rows, proposal=proposal, cache=self.cache, state=self.state)

    def _read(
        self, requests: list[Request], cache: StaticCache, state: State
    ) -> tuple[Work, Tensor, Tensor]:
        """Prompts from the first slot on, and the logits and scores of their first tokens."""
        count = len(cache.positions)
        longest = max(len(request.ids) for request in requests)
        padded = torch.zeros(count, min(bucket(longest), self.slots), dtype=torch.int64)
        lengths, keys = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
        for i, request in enumerate(requests):
            padded[i, : len(request.ids)] = torch.tensor(request.ids)
            lengths[i], keys[i] = len(request.ids), request.row_id
        ids, lengths, keys = (part.to(self.place) for part in (padded, lengths, keys))
        seen, logits, scores, history = self._prefill(
            self.target, cache, self.layers, self.plan.rule, ids, lengths, keys
        )
        plan = self.plan
        rows, told, proposal = self._open(
            plan.rule, plan.ahead, plan.moved, cache.garbage, keys, lengths, scores, history
        )
        if self.draft is not None:
            state, proposal = self._begin(self.draft, state, self.plan, ids, told, seen)
        return Work(rows=rows, proposal=proposal, cache=cache, state=state), logits, scores

    def _room(self, batch: int) -> tuple[StaticCache, State]:
        return self._make_room(self.target, self.draft, batch, self.held)

    def _text(self, ids: list[int]) -> str:
        assert isinstance(self.target, Target)
        return self.target.tokenizer.decode(ids)


def _no_lap(part: str) -> None:
    """Rounds that nobody times."""
