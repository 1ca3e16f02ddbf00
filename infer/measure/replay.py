"""Trajectory replay: compute the acceptance of any draft and tree from one run of the target.

Where the target's tokens do not depend on the draft (greedy, coupled), every prefix of its text is
the start of a possible round. `start` reads the prefix, `propose` builds its tree, and the longest
path of the tree that the text continues with has A(s) draft tokens: those that a round after token
s accepts. Decoding jumps from s to s + A(s) + 1: these starts give the acceptance length itself,
round by round. All starts together predict decoding less directly, but with less noise.

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
from infer.measure.acceptance import AcceptanceCounter, build_comb
from infer.verify import Verification, walk_choices
from models.drafts.base import Draft, DraftState
from models.drafts.mixed import MixedDraft
from models.errors import UserError
from models.speculate.sampling import History, Sampler, SamplingConf, gumbel_noise
from models.speculate.tree import Proposal, Tree, ancestor_mask, node_depths, tree_from_paths
from models.target.language_model import TargetOutput
from models.target.target import Target

STARTS_PER_PASS = 64  # prefixes in one batch
TARGET_BATCH_SIZE = 8  # prompts that the target answers together


@dataclass(frozen=True, kw_only=True)
class ReplayText:
    """A prompt and the target's answer, with the target's output on them.

    Rounds are counted in the first `answer_length` tokens of the answer; the text continues as far
    as the last of these rounds may propose.
    """

    ids: Int[Tensor, " tokens"]
    prompt_length: int
    answer_length: int
    row_id: int
    target_output: TargetOutput

    @property
    def num_starts(self) -> int:
        """Return the number of possible rounds: one after each token of the answer but the last."""
        return self.answer_length - 1


def collect_replay_texts(
    target: Target, prompts: list[EvalPrompt], *, sampling: SamplingConf, max_new_tokens: int,
    layers: list[int], lookahead: int,
) -> list[ReplayText]:  # fmt: skip
    """Generate the target's own answers, and reread each in one pass that captures `layers`.

    `lookahead` is the depth of the deepest node that any tree will have.
    """
    target = target.eager()
    num_tokens = max_new_tokens + lookahead
    slots = max(len(prompt.ids) for prompt in prompts) + num_tokens
    decoder = Decoder(target, sampling=sampling, slots=slots, batch=TARGET_BATCH_SIZE)
    texts = []
    for first in _track_progress(range(0, len(prompts), TARGET_BATCH_SIZE), "the target's answers"):
        batch = prompts[first : first + TARGET_BATCH_SIZE]
        generations = decoder.decode(
            [p.ids for p in batch], row_ids=[p.row_id for p in batch], max_new_tokens=num_tokens
        )
        for prompt, generation in zip(batch, generations, strict=True):
            ids = torch.tensor(prompt.ids + generation.ids, device=target.device.torch_device)
            ends = [i for i, token in enumerate(generation.ids) if token in target.eos_ids]
            texts.append(
                ReplayText(
                    ids=ids, prompt_length=len(prompt.ids), row_id=prompt.row_id,
                    answer_length=min([max_new_tokens, *(end + 1 for end in ends)]),
                    target_output=_capture_features(target, ids, layers),
                )
            )  # fmt: skip
    return texts


@torch.no_grad()
def _capture_features(
    target: Target, ids: Int[Tensor, " tokens"], layers: list[int]
) -> TargetOutput:
    positions = torch.arange(len(ids), device=ids.device)
    causal_mask = positions <= positions[:, None]
    return target.forward_hidden(
        ids[None], positions=positions[None], mask=causal_mask[None, None], layers=layers
    )


class Replay:
    """The replay of one draft on texts of its target. It reads each prefix once, for all trees."""

    def __init__(
        self, target: Target, draft: Draft, texts: list[ReplayText], *, sampling: SamplingConf,
        verification: Verification = Verification.auto,
    ):  # fmt: skip
        if verification not in (Verification.auto, Verification.greedy, Verification.coupled):
            raise UserError(
                f"evaluation.verification: replay needs greedy or coupled, whose answers do not "
                f"depend on the draft, got {verification.value}; decode instead"
            )
        self.draft, self.texts = MixedDraft(draft), texts
        self.rule, self.vocab = sampling, target.vocab_size

    @torch.no_grad()
    def accepted_lengths(self, trees: dict[str, Tree]) -> dict[str, list[Int[ndarray, " starts"]]]:
        """Compute A(s) for every start of every text, by the name of the tree."""
        lengths: dict[str, list] = {name: [] for name in trees}

        def measure_batch(prefixes: "_PrefixBatch") -> dict[str, Tensor]:
            return {name: prefixes.accepted_lengths(tree) for name, tree in trees.items()}

        for batches in self._replay_texts(measure_batch, list(trees.values())):
            for name in trees:
                arrays = [batch[name].cpu().numpy() for batch in batches]
                lengths[name].append(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))
        return lengths

    @torch.no_grad()
    def count_acceptance(self, depth: int, ranks: int) -> AcceptanceCounter:
        """Count acceptance by depth and rank in the rounds that decoding with a comb would have."""
        comb, counter = tree_from_paths(build_comb(depth, ranks)), AcceptanceCounter(depth, ranks)

        def measure_batch(prefixes: "_PrefixBatch") -> tuple[Proposal, Tensor, Tensor]:
            proposal = prefixes.propose(comb)
            return proposal, prefixes.continuation(depth), prefixes.match_proposal(proposal, depth)

        for batches in filter(None, self._replay_texts(measure_batch, [comb])):
            ids = torch.cat([proposal.ids for proposal, *_ in batches])
            parents = torch.cat([proposal.parents for proposal, *_ in batches])
            continuations = torch.cat([batch[1] for batch in batches])
            accepted = torch.cat([batch[2] for batch in batches])
            starts = decoding_starts(accepted.cpu().numpy())
            counter(
                Proposal(ids=ids[starts], parents=parents[starts]),
                continuations[starts],
                1 + accepted[starts],
            )
        return counter

    def _replay_texts(self, measure_batch: Callable, trees: list[Tree]) -> Iterator[list]:
        """Yield the results of `measure_batch` on the batches of starts of each text.

        The list is empty for an answer of a single token, which has no starts.
        """
        extra_slots = 1 + max(
            max(tree.size, tree.scratch_slots) + tree.max_path_length for tree in trees
        )
        for text in _track_progress(self.texts, f"replaying {self.draft.draft.method}"):
            starts = torch.arange(text.num_starts, device=text.ids.device)
            batches = starts.split(STARTS_PER_PASS) if text.num_starts else []
            yield [measure_batch(_PrefixBatch(self, text, batch, extra_slots)) for batch in batches]


class _PrefixBatch:
    """Consecutive starts of a text as rows of a batch, in the state that decoding would be in."""

    def __init__(
        self, replay: Replay, text: ReplayText, starts: Int[Tensor, " batch"], extra_slots: int
    ):  # fmt: skip
        self.replay, self.text = replay, text
        self.roots = text.prompt_length + starts  # positions of the last known tokens
        num_rows = len(starts)
        target_output = TargetOutput(
            hidden=text.target_output.hidden.expand(num_rows, -1, -1),
            captured=text.target_output.captured.expand(num_rows, -1, -1),
        )
        self.state: DraftState = replay.draft.start(
            replay.draft.new_state(num_rows, len(text.ids) + extra_slots),
            text.ids.expand(num_rows, -1),
            lengths=self.roots, first_token=text.ids[self.roots], target_output=target_output,
        )  # fmt: skip

    def propose(self, tree: Tree) -> Proposal:
        sampler = self._build_sampler(tree.max_path_length)
        if tree.copied:
            return self.replay.draft.propose(self.state, tree=tree, sampler=sampler)
        draft = self.replay.draft.draft
        return draft.propose(self.state["draft"], tree=tree, sampler=sampler)

    def _build_sampler(self, lookahead: int) -> Sampler:
        rule, history = self.replay.rule, self._build_history()
        if rule.is_greedy:
            return Sampler(rule=rule, history=history)
        device = self.roots.device
        row_ids = torch.full_like(self.roots, self.text.row_id)
        positions = self.roots[:, None] + 1 + torch.arange(lookahead, device=device)
        vocab_ids = torch.arange(self.replay.vocab, device=device)
        noise = gumbel_noise(rule.seed, row_ids, 0, positions, vocab_ids)
        return Sampler(rule=rule, noise=noise, history=history)

    def _build_history(self) -> History | None:
        """Build the history of each row up to its root; None without penalties."""
        if not self.replay.rule.has_penalties:
            return None
        positions = torch.arange(len(self.text.ids), device=self.roots.device)
        up_to_root = positions <= self.roots[:, None]
        ids = self.text.ids.expand(len(up_to_root), -1)
        zeros = torch.zeros(
            len(up_to_root), self.replay.vocab, dtype=torch.int64, device=ids.device
        )
        return History(
            **{
                name: zeros.scatter_add(1, ids, mask.long()) > 0
                for name, mask in (
                    ("in_text", up_to_root),
                    ("in_answer", up_to_root & (positions >= self.text.prompt_length)),
                )
            }
        )

    def continuation(self, depth: int) -> Int[Tensor, "batch lookahead"]:
        """Return the `depth` + 1 tokens of the text after each root."""
        offsets = 1 + torch.arange(depth + 1, device=self.roots.device)
        return self.text.ids[(self.roots[:, None] + offsets).clamp_max(len(self.text.ids) - 1)]

    def match_proposal(self, proposal: Proposal, depth: int) -> Int[Tensor, " batch"]:
        """Count the accepted draft tokens.

        The target's choice after a node of depth d is token d + 1 of the continuation.
        """
        depths = node_depths(ancestor_mask(proposal.parents))
        choices = self.continuation(int(depths.max())).gather(1, depths)
        return walk_choices(proposal, choices, depth).count - 1

    def accepted_lengths(self, tree: Tree) -> Int[Tensor, " batch"]:
        return self.match_proposal(self.propose(tree), tree.max_path_length)


def decoding_starts(accepted: Int[ndarray, " starts"]) -> Int[ndarray, " rounds"]:
    """Return the starts of the rounds that decoding would have.

    >>> decoding_starts(np.array([2, 0, 1, 0, 3, 0]))
    array([0, 3, 4])
    """
    rounds, start = [], 0
    while start < len(accepted):
        rounds.append(start)
        start += int(accepted[start]) + 1
    return np.array(rounds, dtype=np.int64)


def count_on_policy(accepted: list[Int[ndarray, " starts"]]) -> Float[ndarray, "texts 2"]:
    """Count the tokens and rounds of each text.

    The ratio of their sums is the acceptance length (tau).
    """
    on_policy = [lengths[decoding_starts(lengths)] for lengths in accepted]
    return np.array(
        [[lengths.sum() + len(lengths), len(lengths)] for lengths in on_policy], dtype=np.float64
    )


def count_all_positions(accepted: list[Int[ndarray, " starts"]]) -> Float[ndarray, "texts 2"]:
    """Count the tokens and rounds of each text with a round from every start.

    Decoding does not reach all starts equally often, so that the ratio of sums is not tau.
    """
    return np.array(
        [[lengths.sum() + len(lengths), len(lengths)] for lengths in accepted], dtype=np.float64
    )


def _track_progress(items, description: str):
    return track(items, description, disable=not sys.stderr.isatty())
