"""Trajectory replay: what any draft and tree would have been worth, from one run of the target.

Where the target's tokens do not depend on what was drafted (greedy, coupled), every prefix of its
text is a round that may be asked about. `start` reads the prefix, `propose` draws its tree, and the
longest path of it that the text goes on with is A(s), the draft tokens that a round starting behind
token s accepts. Decoding jumps from s to s + A(s) + 1: these starts give the acceptance length
itself, round by round. All starts together say less about decoding, but with less noise.

Axes: B starts, T tokens of a text, N nodes, D deepest node.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from rich.progress import track
from torch import Tensor

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder
from infer.measure.acceptance import Tally, comb
from infer.verify import Verification, walk
from models.drafts.base import Draft, State
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.speculate.sampling import History, Sampler, SamplingConf, gumbel
from models.speculate.tree import Proposal, Tree, ancestors, depths, static_tree
from models.target.language_model import Seen
from models.target.target import Target

STARTS = 64  # prefixes read at once
BATCH = 8  # prompts that the target answers at once


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and the target's answer, with what the target saw reading them.

    `answer` tokens count; behind them the text goes on as far as the last round may look.
    """

    ids: Int[Tensor, " tokens"]
    prompt: int
    answer: int
    row_id: int
    seen: Seen

    @property
    def starts(self) -> int:
        """Rounds that may be asked about: one behind each token of the answer but the last."""
        return self.answer - 1


def texts(
    target: Target, prompts: list[EvalPrompt], *, sampling: SamplingConf, max_new_tokens: int,
    layers: list[int], ahead: int,
) -> list[Text]:  # fmt: skip
    """The target's own answers, read once more in one pass that captures `layers`.

    `ahead` is the deepest node that any tree will have.
    """
    target = target.eager()
    count = max_new_tokens + ahead
    slots = max(len(prompt.ids) for prompt in prompts) + count
    decoder = Decoder(target, sampling=sampling, slots=slots, batch=BATCH)
    found = []
    for first in _progress(range(0, len(prompts), BATCH), "the target's answers"):
        some = prompts[first : first + BATCH]
        rows = decoder.decode(
            [p.ids for p in some], row_ids=[p.row_id for p in some], max_new_tokens=count
        )
        for prompt, row in zip(some, rows, strict=True):
            ids = torch.tensor(prompt.ids + row.ids, device=target.device.torch_device)
            ends = [i for i, token in enumerate(row.ids) if token in target.eos_ids]
            found.append(
                Text(
                    ids=ids, prompt=len(prompt.ids), row_id=prompt.row_id,
                    answer=min([max_new_tokens, *(end + 1 for end in ends)]),
                    seen=_see(target, ids, layers),
                )
            )  # fmt: skip
    return found


@torch.no_grad()
def _see(target: Target, ids: Int[Tensor, " tokens"], layers: list[int]) -> Seen:
    place = torch.arange(len(ids), device=ids.device)
    causal = place <= place[:, None]
    return target.see(ids[None], positions=place[None], mask=causal[None, None], layers=layers)


class Replay:
    """One draft on texts of its target. The draft reads each prefix once, for all trees."""

    def __init__(
        self, target: Target, draft: Draft, texts: list[Text], *, sampling: SamplingConf,
        verification: Verification = Verification.auto,
    ):  # fmt: skip
        if verification not in (Verification.auto, Verification.greedy, Verification.coupled):
            raise UserError(
                f"evaluation.verification: replay needs greedy or coupled, whose answers do not "
                f"depend on the draft, got {verification.value}; decode instead"
            )
        self.draft, self.texts = MixedDraft(draft), texts
        self.rule, self.vocab = sampling.build(), target.vocab_size

    @torch.no_grad()
    def accepted(self, trees: dict[str, Tree]) -> dict[str, list[Int[ndarray, " starts"]]]:
        """A(s) of every start of every text, by tree."""
        found: dict[str, list] = {name: [] for name in trees}

        def ask(prefixes: "_Prefixes") -> dict[str, Tensor]:
            return {name: prefixes.accepted(tree) for name, tree in trees.items()}

        for parts in self._ask(ask, list(trees.values())):
            for name in trees:
                each = [part[name].cpu().numpy() for part in parts]
                found[name].append(np.concatenate([np.zeros(0, dtype=np.int64), *each]))
        return found

    @torch.no_grad()
    def table(self, depth: int, ranks: int) -> Tally:
        """Acceptance by depth and rank, in the rounds that decoding with a comb comes to."""
        shape, tally = static_tree(comb(depth, ranks)), Tally(depth, ranks)

        def ask(prefixes: "_Prefixes") -> tuple[Proposal, Tensor, Tensor]:
            proposal = prefixes.propose(shape)
            return proposal, prefixes.goes_on(depth), prefixes.matched(proposal, depth)

        for parts in filter(None, self._ask(ask, [shape])):
            ids = torch.cat([proposal.ids for proposal, *_ in parts])
            parents = torch.cat([proposal.parents for proposal, *_ in parts])
            on = torch.cat([part[1] for part in parts])
            accepted = torch.cat([part[2] for part in parts])
            rounds = jumps(accepted.cpu().numpy())
            tally(
                Proposal(ids=ids[rounds], parents=parents[rounds]), on[rounds], 1 + accepted[rounds]
            )
        return tally

    def _ask(self, ask: Callable, trees: list[Tree]) -> Iterator[list]:
        """The answers of each text, some starts at a time; none of one that is a single token."""
        room = 1 + max(max(tree.size, tree.scratch) + tree.deepest for tree in trees)
        for text in _progress(self.texts, f"replaying {self.draft.draft.method}"):
            starts = torch.arange(text.starts, device=text.ids.device)
            some = starts.split(STARTS) if text.starts else []
            yield [ask(_Prefixes(self, text, part, room)) for part in some]


class _Prefixes:
    """Some starts of a text as rows of a batch, as a decoder would hold them."""

    def __init__(
        self, replay: Replay, text: Text, starts: Int[Tensor, " batch"], room: int
    ):  # fmt: skip
        self.replay, self.text = replay, text
        self.roots = text.prompt + starts  # places of the last known tokens
        rows = len(starts)
        seen = Seen(
            hidden=text.seen.hidden.expand(rows, -1, -1),
            captured=text.seen.captured.expand(rows, -1, -1),
        )
        self.state: State = replay.draft.start(
            replay.draft.new_state(rows, len(text.ids) + room), text.ids.expand(rows, -1),
            lengths=self.roots, first=text.ids[self.roots], seen=seen,
        )  # fmt: skip

    def propose(self, tree: Tree) -> Proposal:
        sampler = self._sampler(tree.deepest)
        if tree.copied:
            return self.replay.draft.propose(self.state, tree=tree, sampler=sampler)
        draft = self.replay.draft.draft
        return draft.propose(self.state["draft"], tree=tree, sampler=sampler)

    def _sampler(self, ahead: int) -> Sampler:
        rule, history = self.replay.rule, self._history()
        if rule.greedy:
            return Sampler(rule=rule, history=history)
        device = self.roots.device
        keys = torch.full_like(self.roots, self.text.row_id)
        positions = self.roots[:, None] + 1 + torch.arange(ahead, device=device)
        vocab = torch.arange(self.replay.vocab, device=device)
        noise = gumbel(rule.seed, keys, 0, positions, vocab)
        return Sampler(rule=rule, noise=noise, history=history)

    def _history(self) -> History | None:
        """What each row holds up to its root, for penalties."""
        if not self.replay.rule.penalises:
            return None
        place = torch.arange(len(self.text.ids), device=self.roots.device)
        known = place <= self.roots[:, None]
        ids = self.text.ids.expand(len(known), -1)
        none = torch.zeros(len(known), self.replay.vocab, dtype=torch.int64, device=ids.device)
        return History(**{
            name: none.scatter_add(1, ids, held.long()) > 0
            for name, held in (("known", known), ("said", known & (place >= self.text.prompt)))
        })  # fmt: skip

    def goes_on(self, depth: int) -> Int[Tensor, "batch ahead"]:
        """The text behind each root."""
        ahead = 1 + torch.arange(depth + 1, device=self.roots.device)
        return self.text.ids[(self.roots[:, None] + ahead).clamp_max(len(self.text.ids) - 1)]

    def matched(self, proposal: Proposal, depth: int) -> Int[Tensor, " batch"]:
        """Draft tokens accepted: behind each node of depth d the target wants token d + 1."""
        depth_of = depths(ancestors(proposal.parents))
        choice = self.goes_on(int(depth_of.max())).gather(1, depth_of)
        return walk(proposal, choice, depth).count - 1

    def accepted(self, tree: Tree) -> Int[Tensor, " batch"]:
        return self.matched(self.propose(tree), tree.deepest)


def jumps(accepted: Int[ndarray, " starts"]) -> Int[ndarray, " rounds"]:
    """The starts that decoding comes to.

    >>> jumps(np.array([2, 0, 1, 0, 3, 0]))
    array([0, 3, 4])
    """
    rounds, start = [], 0
    while start < len(accepted):
        rounds.append(start)
        start += int(accepted[start]) + 1
    return np.array(rounds, dtype=np.int64)


def on_policy(accepted: list[Int[ndarray, " starts"]]) -> Float[ndarray, "texts 2"]:
    """Tokens and rounds of each text: the ratio of their sums is the acceptance length (tau)."""
    rounds = [one[jumps(one)] for one in accepted]
    return np.array([[one.sum() + len(one), len(one)] for one in rounds], dtype=np.float64)


def all_positions(accepted: list[Int[ndarray, " starts"]]) -> Float[ndarray, "texts 2"]:
    """The same of rounds from every start, which decoding does not come to equally often."""
    return np.array([[one.sum() + len(one), len(one)] for one in accepted], dtype=np.float64)


def _progress(items, what: str):
    return track(items, what, disable=not sys.stderr.isatty())
