"""Trajectory replay: compute the acceptance of any draft and tree from one run of the target.

If the target's tokens do not depend on the draft (greedy, coupled), a round may start after every token s of its text.
A(s) is the draft tokens that it accepts: the longest path of the tree that the text continues with. Decoding jumps from
s to s + A(s) + 1.

Each text is read once, by one row: consecutive starts become the rows of a batch, copies of that row which read on.

Axes: B starts, T tokens of a text, N nodes, D deepest node.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder
from infer.engine.row_tensors import repeat_row, tensor_bytes
from infer.engine.steps import lookahead_noise
from infer.measure.acceptance import AcceptanceCounter, build_comb
from infer.measure.bench import decode_prompts
from infer.verify.greedy_and_coupled import walk_choices
from models.drafts.base import Draft, DraftState, EmittedPath, ReadPrompts
from models.io.console import track_progress
from models.targets.language_model import TargetOutput
from models.targets.target import Target
from models.trees.growth import ancestor_mask, node_depths
from models.trees.keyed_noise import split_row_ids
from models.trees.sampling import History, Sampler
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, tree_from_paths

STARTS_PER_PASS = 64  # most rows in one batch
STATE_BYTES_PER_PASS = 2**31  # of the draft's caches, which each row has for the whole text
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

    def slice_output(self, start: int, end: int) -> TargetOutput:
        """Return the target's output at these positions."""
        return self.target_output.map_tensors(lambda tensor: tensor[:, start:end])


def collect_replay_texts(
    target: Target,
    prompts: list[EvalPrompt],
    *,
    sampling: SamplingConf,
    max_new_tokens: int,
    layers: list[int],
    lookahead: int,
) -> list[ReplayText]:
    """Return the target's own answers, with its output from one pass that captures `layers`.

    `lookahead` is the depth of the deepest node that any tree will have.
    """
    target = target.eager()
    num_tokens = max_new_tokens + lookahead
    slots = max(len(prompt.ids) for prompt in prompts) + num_tokens
    decoder = Decoder(target, sampling=sampling, slots=slots, batch=TARGET_BATCH_SIZE)
    texts = []
    first_prompts = range(0, len(prompts), TARGET_BATCH_SIZE)
    for first in track_progress(first_prompts, "the target's answers"):
        batch = prompts[first : first + TARGET_BATCH_SIZE]
        generations = decode_prompts(decoder, batch, max_new_tokens=num_tokens, stops_at_eos=False)
        for prompt, generation in zip(batch, generations, strict=True):
            ids = torch.tensor(prompt.ids + generation.ids, device=target.device.torch_device)
            eos_indices = [i for i, token in enumerate(generation.ids) if token in target.eos_ids]
            texts.append(
                ReplayText(
                    ids=ids,
                    prompt_length=len(prompt.ids),
                    row_id=prompt.row_id,
                    answer_length=min([max_new_tokens, *(i + 1 for i in eos_indices)]),
                    target_output=_capture_features(target, ids, layers),
                )
            )
    return texts


@torch.no_grad()
def _capture_features(target: Target, ids: Int[Tensor, " tokens"], layers: list[int]) -> TargetOutput:
    positions = torch.arange(len(ids), device=ids.device)
    causal_mask = positions <= positions[:, None]
    return target.forward_hidden(ids[None], positions=positions[None], mask=causal_mask[None, None], layers=layers)


class Replay:
    """The replay of one draft on texts of its target. It reads each text once, for all trees."""

    def __init__(self, target: Target, draft: Draft, texts: list[ReplayText], *, sampling: SamplingConf):
        self.draft, self.texts = draft, texts
        self.rule, self.vocab_size = sampling, target.vocab_size

    @torch.no_grad()
    def accepted_lengths(self, trees: dict[str, Tree]) -> dict[str, list[Int[ndarray, " _"]]]:
        """Return A(s) for every start of every text, by the name of the tree, which copies no tokens."""
        texts = [
            [{name: b.replay_tree(tree)[-1] for name, tree in trees.items()} for b in batches]
            for batches in self._split_texts(list(trees.values()))
        ]
        no_starts = np.zeros(0, dtype=np.int64)
        return {
            name: [
                np.concatenate([no_starts, *(lengths[name].cpu().numpy() for lengths in batches)]) for batches in texts
            ]
            for name in trees
        }

    @torch.no_grad()
    def count_acceptance(self, depth: int, ranks: int) -> AcceptanceCounter:
        """Return acceptance by depth and rank, counted in the rounds of decoding with a comb of `ranks` candidates."""
        comb, counter = tree_from_paths(build_comb(depth, ranks)), AcceptanceCounter(depth, ranks)
        for batches in self._split_texts([comb]):
            if replayed := [batch.replay_tree(comb) for batch in batches]:
                ids, continuation, accepted = map(torch.cat, zip(*replayed, strict=True))
                starts = decoding_starts(accepted.cpu().numpy())  # decoding begins rounds only at these
                counter.count_rounds(ids[starts], continuation[starts])
        return counter

    def _split_texts(self, trees: list[Tree]) -> Iterator[Iterator["_PrefixBatch"]]:
        """Yield for each text an iterator over batches of its starts; only one is in memory.

        Exhaust each iterator before the next is taken. It is empty for a text whose answer is a
        single token, which has no starts.
        """
        extra_slots = max(tree.round_slots for tree in trees)
        lookahead = max(tree.max_path_length for tree in trees)
        for text in track_progress(self.texts, f"replaying {self.draft.method}"):
            yield self._split_starts(text, len(text.ids) + extra_slots, lookahead)

    def _split_starts(self, text: ReplayText, slots: int, lookahead: int) -> Iterator["_PrefixBatch"]:
        """Yield the starts of a text in batches of bounded memory."""
        if not text.num_starts:
            return
        root, end = text.prompt_length, text.prompt_length + text.num_starts
        prompts = ReadPrompts(
            ids=text.ids[None, :root],
            lengths=text.ids.new_tensor([root]),
            first_token=text.ids[root : root + 1],
            target_output=text.slice_output(0, root),
        )
        state = self.draft.start(self.draft.new_state(1, slots), prompts)
        most_rows = max(1, STATE_BYTES_PER_PASS // tensor_bytes(state))
        while root < end:
            rows = min(STARTS_PER_PASS, most_rows, end - root)
            roots = root + torch.arange(rows, device=text.ids.device)
            copies = repeat_row(state, rows)
            if rows > 1:
                copies = self._read_on(copies, text, slice(root, root + rows - 1), roots - root)
            yield _PrefixBatch(self, text, roots, copies, lookahead)
            state = self._read_on(state, text, slice(root, root + rows), roots.new_tensor([rows]))
            root += rows

    def _read_on(self, state: DraftState, text: ReplayText, places: slice, count: Int[Tensor, " rows"]) -> DraftState:
        """Return the state after each row reads the first `count` tokens behind `places`."""
        output, rows = text.slice_output(places.start, places.stop), len(count)
        emitted = EmittedPath(
            ids=text.ids[1:][places].expand(rows, -1),
            count=count,
            target_output=output.map_tensors(lambda tensor: tensor.expand(rows, -1, -1)),
        )
        return self.draft.advance(state, emitted)


class _PrefixBatch:
    """Consecutive starts of a text as rows of a batch, in the state that decoding has there."""

    def __init__(
        self, replay: Replay, text: ReplayText, roots: Int[Tensor, " batch"], state: DraftState, lookahead: int
    ):
        self.draft, self.text, self.state = replay.draft, text, state
        self.roots = roots  # positions of the last known tokens
        rule, vocab_size = replay.rule, replay.vocab_size
        history = None
        if rule.has_penalties:  # they count the tokens up to the root
            ids, starts = text.ids.expand(len(roots), -1), roots - text.prompt_length
            answer_ids = ids[:, text.prompt_length :]
            history = History(
                in_text=History.from_prompts(ids, roots + 1, vocab_size).in_text,
                in_answer=History.from_prompts(answer_ids, starts + 1, vocab_size).in_text,
            )
        row_limbs = split_row_ids([text.row_id] * len(roots)).to(roots.device)
        noise = lookahead_noise(rule, 0 if rule.is_greedy else lookahead, vocab_size, row_limbs, roots + 1)
        self.sampler = Sampler(rule=rule, noise=noise, history=history)

    def replay_tree(self, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Return the proposal's ids, the ids after each start, and A(s).

        The target's choice after a node of depth d is token d + 1 of the continuation.
        """
        proposal = self.draft.propose(self.state, tree=tree, sampler=self.sampler)
        offsets = 1 + torch.arange(tree.max_path_length + 1, device=self.roots.device)
        positions = (self.roots[:, None] + offsets).clamp_max(len(self.text.ids) - 1)
        continuation = self.text.ids[positions]
        choices = continuation.gather(1, node_depths(ancestor_mask(proposal.parents)))
        accepted = walk_choices(proposal, choices, tree.max_path_length).count - 1
        return proposal.ids, continuation, accepted


def decoding_starts(accepted: Int[ndarray, " starts"]) -> Int[ndarray, " rounds"]:
    """Return the starts that decoding reaches: a round begins after the tokens of the last one.

    `accepted` holds the draft tokens that a round from each start accepts; it emits one more.

    >>> decoding_starts(np.array([2, 0, 1, 0, 3, 0]))
    array([0, 3, 4])
    """
    rounds, start = [], 0
    while start < len(accepted):
        rounds.append(start)
        start += int(accepted[start]) + 1
    return np.array(rounds, dtype=np.int64)


def count_on_policy(accepted: list[Int[ndarray, " _"]]) -> Float[ndarray, "texts 2"]:
    """Return the tokens and rounds of decoding each text; the ratio of their sums is tau."""
    rounds = [lengths[decoding_starts(lengths)] for lengths in accepted]
    return np.array([[lengths.sum() + len(lengths), len(lengths)] for lengths in rounds], dtype=np.float64)
