"""The decoding loop: rows of prompts in fixed slots, each finished one replaced by the next prompt.

A prompt is read alone and its row put in place; then all rows go through rounds together
(infer/rounds.py), however many tokens each of them accepts. The host reads one small tensor a
round. Autoregressive decoding is the same loop with an empty tree.

Axes: B rows, P padded prompt, N nodes, D deepest node.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from infer import rounds
from infer.laps import Laps
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


@dataclass(kw_only=True)
class Spent:
    """Seconds of one call of `decode`: each round counts once, however many rows it served."""

    prefill_s: float = 0.0
    round_s: float = 0.0
    rounds: int = 0

    def count(self, round_s: float) -> None:
        self.round_s, self.rounds = self.round_s + round_s, self.rounds + 1


@dataclass(kw_only=True)
class _Request:
    place: int  # in what was asked
    ids: list[int]
    row_id: int
    limit: int


def bucket(length: int) -> int:
    """The padded length at which a prompt is read: a power of two, so that few graphs do."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


class Decoder:
    """Decodes prompts with one target, one draft and one tree shape, in a fixed number of slots."""

    def __init__(
        self, target: Transformer, draft: Draft | None = None, tree: Tree = NO_TREE, *,
        sampling: SamplingConf, slots: int, batch: int = 1, layers: list[int] | None = None,
        verifier: Verifier | None = None, fused: bool | None = None,
    ):  # fmt: skip
        if draft is not None and tree.depth > draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {draft.max_depth} tokens that the draft can "
                f"propose, got {tree.depth}; lower tree.depth or raise draft.max_depth"
            )
        verifier = verifier or build(Verification.auto, sampling)
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
        # behind the last token: a round's nodes, and what it emits beyond the end
        scratch = max(max(tree.size, tree.scratch) + tree.deepest + 1, SMALLEST_SCRATCH)
        self.held = -(-(slots + scratch) // SLOTS_STEP) * SLOTS_STEP
        self.cache, self.state = self._room(batch)
        self._reader = (self.cache, self.state) if batch == 1 else self._room(1)
        self.spent = Spent()
        self._last: tuple[Rows, Proposal] | None = None
        # a target does not change; a draft that writes texts of its own does
        settled = SETTLED if isinstance(target, Target) else ()
        self._prefill = device.compile(rounds.prefill, settled=settled)
        self._begin = device.compile(rounds.begin)
        self._fused = device.compile(rounds.fused, settled=settled)
        self._score = device.compile(rounds.score, settled=settled)
        self._accept = device.compile(rounds.accept)
        self._move = device.compile(rounds.move)
        self._go_on = device.compile(rounds.go_on)

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
        waiting = deque(self._requests(prompts, row_ids, max_new_tokens))
        stopping = Stopping(
            eos_ids=frozenset(eos_ids or []), strings=tuple(stop), text=self._text if stop else None
        )
        done = [Decoded() for _ in prompts]
        busy: dict[int, _Request] = {}
        rows = proposal = None
        self.spent = Spent()
        while waiting or busy:
            for slot in range(self.batch):
                while slot not in busy and waiting:
                    request = waiting.popleft()
                    rows, proposal = self._admit(slot, request, done, rows, proposal)
                    if not _ended(done[request.place], request, stopping, known=0):
                        busy[slot] = request
            if not busy:
                break
            assert rows is not None and proposal is not None
            active = [slot in busy for slot in range(self.batch)]
            rows.active = torch.tensor(active, device=self.place)
            began = time.perf_counter()
            if laps is not None:
                laps.start()
            tree = proposal
            rows, proposal, emitted = self._round(rows, proposal, laps)
            if watch is not None:
                watch(tree, emitted.ids, emitted.count)
            told = emitted.told().tolist()  # the one read of the round
            took = time.perf_counter() - began
            self.spent.count(took)
            if record is not None:
                record.append(emitted.logits[0, : told[0][-1]].clone())
            for slot, request in list(busy.items()):
                *tokens, number = told[slot]
                answer = done[request.place]
                known = len(answer.ids)
                answer.ids += tokens[:number]
                answer.accepted.append(number - 1)
                answer.drafted.append(self.nodes)
                answer.round_s.append(took)
                if _ended(answer, request, stopping, known=known):
                    del busy[slot]
            if laps is not None:
                laps.lap("host")
                laps.finish(time.perf_counter() - began)
        return done

    @torch.no_grad()
    def forced(self, prompt: list[int], row_id: int, ids: list[int]) -> Iterator[Tensor]:
        """The target's scores of the place of each of `ids`, read one token at a time.

        Scores are what the rule takes the largest of: logits, or warped logits plus noise. For a
        decoder without a draft.
        """
        rows, _, scores = self._read(prompt, row_id)
        yield scores[0]
        for token in ids[:-1]:
            rows.root = torch.full_like(rows.root, token)
            if rows.history is not None:
                rows.history = rows.history.add(rows.root[:, None], torch.ones_like(rows.root))
            rows, _, emitted = self._round(rows, self._empty(1))
            yield emitted.scores[0, 0]

    @torch.no_grad()
    def again(self) -> None:
        """The last round once more, to time it. What it leaves in the caches is of no use."""
        assert self._last is not None
        self._round(*self._last)

    # --- rounds -------------------------------------------------------------------------------

    def _round(
        self, rows: Rows, proposal: Proposal, laps: Laps | None = None
    ) -> tuple[Rows, Proposal, Round]:
        self._last = rows, proposal
        if self.fused and laps is None:
            rows, emitted, self.state, proposal = self._fused(
                self.target, self.cache, self.layers, self.plan, self.draft, self.state, rows,
                proposal,
            )  # fmt: skip
            return rows, proposal, emitted
        lap = laps.lap if laps else _no_lap
        seen, logits = self._score(self.target, self.cache, self.layers, rows, proposal)
        lap("verify")
        rows, emitted = self._accept(
            self.plan, self.cache.garbage, rows, proposal, seen, logits
        )
        lap("accept")
        if self.plan.moved:
            rows = self._move(self.cache, rows)
        lap("cache_move")
        if self.draft is not None:
            self.state, proposal = self._go_on(self.draft, self.state, self.plan, rows, emitted)
        lap("draft")
        return rows, proposal, emitted

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
            yield _Request(place=place, ids=ids, row_id=row_id, limit=limit)

    def _admit(
        self, slot: int, request: _Request, done: list[Decoded], rows: Rows | None,
        proposal: Proposal | None,
    ) -> tuple[Rows, Proposal]:  # fmt: skip
        """Read a prompt and put its row into the batch."""
        began = time.perf_counter()
        one, first, _ = self._read(request.ids, request.row_id)
        done[request.place].ids = one.root.tolist()
        done[request.place].prefill_s = time.perf_counter() - began
        if self.batch > 1:
            whole = (rows, proposal) if rows is not None else _blank((one, first), self.batch)
            place = torch.tensor([slot], device=self.place)
            (one, first, self.cache, self.state) = put(
                (*whole, self.cache, self.state), (one, first, *self._reader), place
            )
        self.spent.prefill_s += time.perf_counter() - began
        return one, first

    def _read(self, ids: list[int], row_id: int) -> tuple[Rows, Proposal, Tensor]:
        """A prompt alone: its row, its first proposal, the scores of its first token."""
        cache, state = self._reader
        padded = torch.zeros(1, min(bucket(len(ids)), self.slots), dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        padded = padded.to(self.place)
        length, key = (torch.tensor([value], device=self.place) for value in (len(ids), row_id))
        rows, seen, scores = self._prefill(
            self.target, cache, self.layers, self.plan, padded, length, key
        )
        proposal = self._empty(1)
        if self.draft is not None:
            state, proposal = self._begin(self.draft, state, self.plan, padded, rows, seen)
        self._reader = cache, state
        if self.batch == 1:
            self.state = state
        return rows, proposal, scores

    def _room(self, batch: int) -> tuple[StaticCache, State]:
        state = self.draft.new_state(batch, self.held) if self.draft else {}
        return self.target.new_cache(batch, self.held), state

    def _empty(self, batch: int) -> Proposal:
        none = torch.zeros(batch, 0, dtype=torch.int64, device=self.place)
        return Proposal(ids=none, parents=none)

    def _text(self, ids: list[int]) -> str:
        assert isinstance(self.target, Target)
        return self.target.tokenizer.decode(ids)


def put(whole: Any, one: Any, slot: Int[Tensor, " 1"]) -> Any:
    """`whole` with its row `slot` as the only row of `one`, of whatever they are made."""
    if isinstance(whole, Tensor):
        return whole.index_copy(0, slot, one)
    if isinstance(whole, StaticCache):  # in place: it is the largest thing there is
        whole.put(one, slot)
        return whole
    if is_dataclass(whole):
        names = [f.name for f in fields(whole)]
        parts = {name: put(getattr(whole, name), getattr(one, name), slot) for name in names}
        return type(whole)(**parts)
    if isinstance(whole, dict):
        return {name: put(part, one[name], slot) for name, part in whole.items()}
    if isinstance(whole, tuple):
        return tuple(put(a, b, slot) for a, b in zip(whole, one, strict=True))
    return whole


def _blank(one: Any, batch: int) -> Any:
    """Rows that have not begun, of the shapes of one that has."""
    if isinstance(one, Tensor):
        return one.new_zeros(batch, *one.shape[1:])
    if is_dataclass(one):
        return type(one)(**{f.name: _blank(getattr(one, f.name), batch) for f in fields(one)})
    if isinstance(one, tuple):
        return tuple(_blank(part, batch) for part in one)
    return one


def _ended(answer: Decoded, request: _Request, stopping: Stopping, *, known: int) -> bool:
    """Whether an answer is whole; then it is cut."""
    end = stopping.end(answer.ids, known=known, limit=request.limit)
    answer.ids = answer.ids[:end]
    return end is not None


def _no_lap(part: str) -> None:
    """Rounds that nobody times."""
