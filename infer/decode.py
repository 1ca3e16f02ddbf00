"""The static-shape decoding loop: prefill, then rounds of verify and draft.

A round is two functions of tensors, each compiled to one graph: `verify` scores the proposed tree
and walks it; `draft_round` tells the draft what was emitted and takes its next proposal. The host
reads one small tensor a round. Autoregressive decoding is the same loop with an empty tree. The
functions take everything they touch as arguments, so decoders share their graphs.

Axes: B rows, P padded prompt, N nodes, D deepest node, S slots, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.verify import Typical, walk, walk_typical
from models.cache import StaticCache, Write, prompt_mask, tree_mask
from models.drafts.base import Draft, State
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.sampling import Sampler, SamplingConf, SamplingRule, gumbel
from models.target import Target
from models.transformer import Seen, Transformer
from models.tree import NO_TREE, Proposal, Tree, TreeKind, ancestors, depths

SMALLEST_BUCKET = 64  # tokens; prompts are padded to the next power of two: one graph each
SMALLEST_SCRATCH = 32  # slots that a round may use at least: see SLOTS_STEP
SLOTS_STEP = 32  # caches are rounded up to it, so that decoders of different trees share graphs
# Parts of the arguments of prefill and verify. Two others tell which they are, and are checked: the
# target's fingerprint and the cache's number of slots.
SETTLED = ("target.decoder.", "cache.keys[", "cache.values[")

# told of each round: the tree that was verified, the emitted ids [B, D+1], how many of them [B]
Watch = Callable[[Proposal, Tensor, Tensor], None]


@dataclass(kw_only=True)
class Decoded:
    """One row's answer, and what each round was worth."""

    ids: list[int]
    accepted: list[int]  # draft tokens accepted in each round, the target's own not counted
    drafted: list[int]  # nodes proposed in each round
    prefill_s: float = 0.0  # until the first token is on the host
    round_s: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Rows:
    """Where each row stands. The root is the last known token; its key is not in the cache yet."""

    row_ids: Int[Tensor, " batch"]  # from the data, never the batch slot: they key the noise
    lengths: Int[Tensor, " batch"]  # committed tokens, the root not counted
    root: Int[Tensor, " batch"]
    active: Bool[Tensor, " batch"]
    noise: Float[Tensor, "batch ahead vocab"] | None  # of the depth + 1 positions behind the root
    source: Int[Tensor, "batch moved"]  # slots of the last round's path, which the next pass moves
    goal: Int[Tensor, "batch moved"]  # to these; none of a chain, which is in place already


def bucket(length: int) -> int:
    """The padded length at which a prompt is read: a power of two, so that few graphs do."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def _noise(
    rule: SamplingRule, rows_ids: Tensor, lengths: Tensor, count: int, vocab: int
) -> Tensor | None:
    """Noise of the `count` positions from `lengths` on; None where nothing is sampled."""
    if rule.greedy:
        return None
    positions = lengths[:, None] + torch.arange(count, device=lengths.device)
    tokens = torch.arange(vocab, device=lengths.device)
    return gumbel(rule.seed, rows_ids, 0, positions, tokens)


def prefill(
    target: Transformer, cache: StaticCache, layers: list[int], rule: SamplingRule,
    ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"],
    row_ids: Int[Tensor, " batch"], ahead: int,
) -> tuple[Rows, Seen]:  # fmt: skip
    """Read the padded prompts; the first token of each row becomes its root."""
    count, slots = ids.shape[1], cache.garbage + 1
    rows = torch.arange(count, device=ids.device).expand_as(ids)
    seen = target.see(
        ids, positions=rows, mask=prompt_mask(lengths, count, slots),
        layers=layers, cache=cache, write=Write.at(rows),
    )  # fmt: skip
    last = (lengths - 1).clamp_min(0)[:, None, None].expand(-1, 1, seen.hidden.shape[-1])
    logits = target.logits(seen.hidden.gather(1, last))
    first = _noise(rule, row_ids, lengths, 1, logits.shape[-1])
    root = rule.scores(logits, first).argmax(-1)[:, 0]
    noise = _noise(rule, row_ids, lengths + 1, ahead, logits.shape[-1])
    return Rows(
        row_ids=row_ids, lengths=lengths, root=root, active=lengths > 0, noise=noise,
        source=ids[:, :0], goal=ids[:, :0],
    ), seen  # fmt: skip


def verify(
    target: Transformer, cache: StaticCache, layers: list[int], rule: SamplingRule,
    rows: Rows, proposal: Proposal, depth: int, typical: Typical | None,
) -> tuple[Rows, Seen, Tensor, Tensor, Tensor]:  # fmt: skip
    """Score root and nodes in one pass and keep the path that the target would have taken.

    With `typical` the path that it might have taken.

    Returns the rows after the round, what the target saw along the path, the emitted ids and their
    count, and the logits behind each node of the path.
    """
    ids = torch.cat([rows.root[:, None], proposal.ids], 1)
    nodes, slots = ids.shape[1], cache.garbage + 1
    sees = ancestors(proposal.parents)
    depth_of = depths(sees)
    place = rows.lengths[:, None] + torch.arange(nodes, device=ids.device)
    seen = target.see(
        ids, positions=rows.lengths[:, None] + depth_of, mask=tree_mask(rows.lengths, sees, slots),
        layers=layers, cache=cache,
        write=Write(
            slots=torch.where(rows.active[:, None], place, cache.garbage),
            source=rows.source, goal=rows.goal,
        ),
    )  # fmt: skip
    logits = target.logits(seen.hidden)
    noise = rows.noise
    if noise is not None:
        noise = noise.gather(1, depth_of[:, :, None].expand(-1, -1, noise.shape[-1]))
    choice = rule.scores(logits, noise).argmax(-1)
    if typical is None:
        accepted = walk(proposal, choice, depth)
    else:
        accepted = walk_typical(proposal, choice, rule.warp(logits), depth, typical=typical)
    count = torch.where(rows.active, accepted.count, 0)

    step = torch.arange(1, rows.source.shape[1] + 1, device=ids.device)
    moves = step < count[:, None]
    nodes_to_move = accepted.nodes[:, 1 : 1 + len(step)]
    path = accepted.nodes[:, :, None]
    along = Seen(
        hidden=seen.hidden.gather(1, path.expand(-1, -1, seen.hidden.shape[-1])),
        captured=seen.captured.gather(1, path.expand(-1, -1, seen.captured.shape[-1])),
    )
    lengths = rows.lengths + count
    last = accepted.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    after = Rows(
        row_ids=rows.row_ids, lengths=lengths, active=rows.active,
        root=torch.where(rows.active, last, rows.root),
        noise=_noise(rule, rows.row_ids, lengths + 1, depth + 1, logits.shape[-1]),
        source=torch.where(moves, rows.lengths[:, None] + nodes_to_move, cache.garbage),
        goal=torch.where(moves, rows.lengths[:, None] + step, cache.garbage),
    )  # fmt: skip
    on_path = logits.gather(1, path.expand(-1, -1, logits.shape[-1]))
    return after, along, accepted.ids, count, on_path


def draft_start(draft: Draft, state: State, ids: Tensor, rows: Rows, seen: Seen) -> State:
    """Show the draft the prompt and its first token."""
    return draft.start(state, ids, lengths=rows.lengths, first=rows.root, seen=seen)


def draft_round(
    draft: Draft, state: State, tree: Tree, rule: SamplingRule,
    ids: Tensor, count: Tensor, rows: Rows, seen: Seen,
) -> tuple[State, Proposal]:  # fmt: skip
    """Show the draft what was emitted, and take its next proposal."""
    state = draft.advance(state, ids, count=count, seen=seen)
    return state, draft.propose(state, tree=tree, sampler=Sampler(rule=rule, noise=rows.noise))


class Decoder:
    """Decodes prompts with one target, one draft and one tree shape, in a fixed number of slots."""

    def __init__(
        self, target: Transformer, draft: Draft | None = None, tree: Tree = NO_TREE, *,
        sampling: SamplingConf, slots: int, batch: int = 1, layers: list[int] | None = None,
        verification: Typical | None = None,
    ):  # fmt: skip
        if draft is not None and tree.depth > draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {draft.max_depth} tokens that the draft can "
                f"propose, got {tree.depth}; lower tree.depth or raise draft.max_depth"
            )
        if verification is not None:
            verification.check(sampling)
        if draft is not None and tree.copied:
            draft = MixedDraft(draft)
        self.target, self.draft, self.tree, self.typical = target, draft, tree, verification
        self.rule, self.batch, self.slots = sampling.build(), batch, slots
        self.depth, self.nodes = tree.deepest, tree.size
        # positions to make noise for; without sampling none, so that all depths share a graph
        self.ahead = 0 if self.rule.greedy else tree.deepest + 1
        # all modes of an evaluation capture the same layers: they share graphs, none runs lighter
        self.layers = layers or (draft.needs.layers if draft else [])
        device = target.device
        self.place = device.torch_device
        # behind the last token: a round's nodes, and what it emits beyond the end
        scratch = max(max(tree.size, tree.scratch) + tree.deepest + 1, SMALLEST_SCRATCH)
        held = -(-(slots + scratch) // SLOTS_STEP) * SLOTS_STEP
        self.cache = target.new_cache(batch, held)
        self.state = draft.new_state(batch, held) if draft else {}
        # a target does not change; a draft that writes texts of its own does
        settled = SETTLED if isinstance(target, Target) else ()
        self._prefill = device.compile(prefill, settled=settled)
        self._verify = device.compile(verify, settled=settled)
        self._start, self._round = device.compile(draft_start), device.compile(draft_round)

    @torch.no_grad()
    def decode(
        self, prompts: list[list[int]], *, row_ids: list[int], max_new_tokens: int,
        eos_ids: list[int] | None = None, record: list[Tensor] | None = None,
        watch: Watch | None = None,
    ) -> list[Decoded]:  # fmt: skip
        """Continue up to `batch` prompts. Answers are cut at `max_new_tokens` and behind an EOS.

        `record` collects the target's logits behind each emitted token, for batch 1; `watch` sees
        every round, at the cost of waiting for it.
        """
        longest = max(len(prompt) for prompt in prompts)
        if longest + max_new_tokens > self.slots:
            raise UserError(
                f"evaluation.max_new_tokens: prompt and answer must fit in {self.slots} tokens, "
                f"got {longest} + {max_new_tokens}; shorten the prompts"
            )
        done = [Decoded(ids=[], accepted=[], drafted=[]) for _ in prompts]
        stop = set(eos_ids or [])
        began = time.perf_counter()
        ids, lengths, keys = self._pad(prompts, row_ids)
        rows, seen = self._read(ids, lengths, keys)
        first = rows.root.tolist()
        now = time.perf_counter()
        for row, token in zip(done, first, strict=False):
            row.ids.append(token)
            row.prefill_s = now - began
        proposal = self._empty()
        if self.draft is not None:
            self.state = self._start(self.draft, self.state, ids, rows, seen)
            self.state, proposal = self._round(  # nothing new: the round's graph serves here too
                self.draft, self.state, self.tree, self.rule, *self._nothing(seen, rows)
            )
        open_rows = self._open(done, stop, max_new_tokens)
        while open_rows:
            began = now if not done[0].round_s else time.perf_counter()
            rows, seen, emitted, count, logits = self._score(rows, proposal)
            if watch is not None:
                watch(proposal, emitted, count)
            if self.draft is not None:
                self.state, proposal = self._round(
                    self.draft, self.state, self.tree, self.rule, emitted, count, rows, seen
                )
            self._last = (rows, proposal, emitted, count, seen)
            told = torch.cat([emitted, count[:, None]], 1).tolist()  # the one read of the round
            took = time.perf_counter() - began
            if record is not None:
                record.append(logits[0, : told[0][-1]].clone())
            for i in open_rows:
                *tokens, number = told[i]
                done[i].ids += tokens[:number]
                done[i].accepted.append(number - 1)
                done[i].drafted.append(self.nodes)
                done[i].round_s.append(took)
            still = self._open(done, stop, max_new_tokens)
            if still != open_rows and still:
                active = [i in still for i in range(self.batch)]
                rows.active = torch.tensor(active, device=self.place)
            open_rows = still
        for row in done:
            row.ids = _cut(row.ids, stop, max_new_tokens)
        return done

    @torch.no_grad()
    def forced(self, prompt: list[int], row_id: int, ids: list[int]) -> Iterator[Tensor]:
        """The target's scores of the place of each of `ids`, read one token at a time.

        Scores are what the rule takes the largest of: logits, or warped logits plus noise.
        """
        padded, lengths, keys = self._pad([prompt], [row_id])
        rows, seen = self._read(padded, lengths, keys)
        logits = self.target.logits(seen.hidden[:, len(prompt) - 1][:, None])
        first = _noise(self.rule, keys, lengths, 1, logits.shape[-1])
        yield self.rule.scores(logits, first)[0, 0]
        for token in ids[:-1]:
            rows.root = torch.full_like(rows.root, token)
            noise = rows.noise
            rows, *_, logits = self._score(rows, self._empty())
            yield self.rule.scores(logits, noise)[0, 0]

    @torch.no_grad()
    def verify_again(self) -> None:
        """The last round's verification once more, to time it."""
        rows, proposal, *_ = self._last
        self._score(rows, proposal)

    @torch.no_grad()
    def draft_again(self) -> None:
        """The last round's draft pass once more, to time it."""
        rows, _, emitted, count, seen = self._last
        if self.draft is not None:
            self._round(self.draft, self.state, self.tree, self.rule, emitted, count, rows, seen)

    def _score(
        self, rows: Rows, proposal: Proposal
    ) -> tuple[Rows, Seen, Tensor, Tensor, Tensor]:  # fmt: skip
        return self._verify(
            self.target, self.cache, self.layers, self.rule, rows, proposal, self.depth,
            self.typical,
        )  # fmt: skip

    def _pad(self, prompts: list[list[int]], row_ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        padded = min(bucket(max(len(prompt) for prompt in prompts)), self.slots)
        ids = torch.zeros(self.batch, padded, dtype=torch.int64)
        lengths = torch.zeros(self.batch, dtype=torch.int64)
        keys = torch.zeros(self.batch, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
            lengths[i], keys[i] = len(prompt), row_ids[i]
        return ids.to(self.place), lengths.to(self.place), keys.to(self.place)

    def _nothing(self, seen: Seen, rows: Rows) -> tuple[Tensor, Tensor, Rows, Seen]:
        """What `draft_round` is told where no token was emitted."""
        ids = torch.zeros(self.batch, self.depth + 1, dtype=torch.int64, device=self.place)
        blank = Seen(
            hidden=seen.hidden.new_zeros(*ids.shape, seen.hidden.shape[-1]),
            captured=seen.captured.new_zeros(*ids.shape, seen.captured.shape[-1]),
        )
        return ids, torch.zeros_like(rows.lengths), rows, blank

    def _read(self, ids: Tensor, lengths: Tensor, keys: Tensor) -> tuple[Rows, Seen]:
        """Prefill, which all trees share; then as many moves as this tree makes, to no effect."""
        rows, seen = self._prefill(
            self.target, self.cache, self.layers, self.rule, ids, lengths, keys, self.ahead
        )
        moved = 0 if self.tree.kind is TreeKind.chain and not self.tree.copied else self.depth
        # two tensors, laid out as verify lays them out: else the first round has its own graph
        rows.source, rows.goal = (
            torch.full((self.batch, moved), self.cache.garbage, device=self.place) for _ in range(2)
        )
        return rows, seen

    def _empty(self) -> Proposal:
        none = torch.zeros(self.batch, 0, dtype=torch.int64, device=self.place)
        return Proposal(ids=none, parents=none)

    @staticmethod
    def _open(done: list[Decoded], stop: set[int], limit: int) -> list[int]:
        return [
            i
            for i, row in enumerate(done)
            if len(row.ids) < limit and not stop.intersection(row.ids)
        ]


def _cut(ids: list[int], stop: set[int], limit: int) -> list[int]:
    """Where decoding one token at a time would have ended."""
    ids = ids[:limit]
    ends = [i for i, token in enumerate(ids) if token in stop]
    return ids[: ends[0] + 1] if ends else ids
