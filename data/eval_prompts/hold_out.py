"""Split of the documents into training and held-out conversations.

    documents -> groups of conversations with the same first question -> final, selection, training

The system prompt does not count: with a date or a name in it, judged questions could be learned. Where only tokens are
known, the first prompt counts as the question. Groups are not split, because with data.turns=each a later turn repeats
the first. A group of more than 1 % of the documents, such as texts with a common header, is never held back.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import xxhash
from jaxtyping import Bool, Int

from data.packing.documents import Documents
from data.packing.pack import count_piece_answers, cut_documents

log = logging.getLogger(__name__)
MIN_GROUP_LIMIT = 64  # documents that one group may always hold back, even of a small dataset
# A plain text is answer from its second token on, so its prompt is its first tokens.
TEXT_PROMPT_TOKENS = 16


@dataclass(kw_only=True)
class HeldOutSplit:
    """Document numbers: those to train on, and those whose prompts are held back."""

    training: Int[np.ndarray, " training"]
    selection: list[int]
    final: list[int]
    num_groups: int  # groups with a usable prompt
    num_too_long: int  # groups without a usable prompt


def split_held_out(
    documents: Documents, *, selection: int, final: int, row_length: int, max_prompt_tokens: int | None = None
) -> HeldOutSplit:
    """Hold back at most half of the groups, spread over the data and all of its categories.

    `selection` and `final` are numbers of prompts; beside `final`, `selection` gets at most a third of what may be held
    back. If nothing may, training prompts stand in for `selection`, with a warning.
    """
    numbers = np.arange(len(documents))
    lengths = prompt_lengths(documents)
    pieces = cut_documents(documents.lengths, numbers, row_length, None)
    longest = np.inf if max_prompt_tokens is None else max_prompt_tokens
    usable = (count_piece_answers(documents, pieces) > 0) & (lengths <= longest)
    group = group_by_prompt(documents, lengths)
    is_common = np.bincount(group) > max(MIN_GROUP_LIMIT, len(documents) // 100)
    if is_common.any():
        log.info("data: %d documents that begin like many others are not held back", is_common[group].sum())
    members = _list_members(group, numbers[usable & ~is_common[group]])
    max_held_out = len(members) // 2
    num_selection = min(selection, round(max_held_out / 3) if final else max_held_out)
    final_groups = _spread_groups(documents, members, min(final, max_held_out - num_selection))
    final_documents = {docs[0] for docs in final_groups}
    remaining = [docs for docs in members if docs[0] not in final_documents]
    selection_groups = _spread_groups(documents, remaining, num_selection)
    held_out = [group[docs[0]] for docs in final_groups + selection_groups]
    if selection and usable.any() and not selection_groups:
        log.warning("data: too little to hold prompts back: training prompts choose the checkpoint")
        selection_groups = (remaining or _list_members(group, numbers[usable]))[:selection]
    return HeldOutSplit(
        training=numbers[~np.isin(group, held_out)],
        selection=_pick_turns(selection_groups),
        final=_pick_turns(final_groups),
        num_groups=len(members),
        num_too_long=len(np.unique(group[~is_common[group]])) - len(members),
    )


def prompt_lengths(documents: Documents) -> Int[np.ndarray, " documents"]:
    """Count the tokens before each first answer token, or the first few tokens of a plain text."""
    return np.array([_prompt_length(documents.answer[i:j]) for i, j in pairwise(documents.starts.tolist())], np.int64)


def _prompt_length(answer: Bool[np.ndarray, " tokens"]) -> int:
    answer_start = int(answer.argmax()) if len(answer) else 0
    return answer_start if answer_start > 1 else min(len(answer), TEXT_PROMPT_TOKENS)


def group_by_prompt(documents: Documents, lengths: Int[np.ndarray, " documents"]) -> Int[np.ndarray, " documents"]:
    """Assign a group number to each document, shared by conversations of one first question."""
    _, first, conversation = np.unique(documents.conversation, return_index=True, return_inverse=True)
    questions = documents.first_question[first].tolist()
    spans = zip(questions, documents.starts[first].tolist(), lengths[first].tolist(), strict=True)
    hashes = [
        question or xxhash.xxh3_64_intdigest(np.ascontiguousarray(documents.ids[begin : begin + length]).data)
        for question, begin, length in spans
    ]
    _, group = np.unique(np.array(hashes, np.uint64), return_inverse=True)
    return group[conversation]


def _list_members(group: Int[np.ndarray, " documents"], chosen: Int[np.ndarray, " chosen"]) -> list[list[int]]:
    """List the chosen documents of each group that has any, in the order of the data."""
    by_group = sorted(chosen.tolist(), key=group.__getitem__)
    return sorted(list(docs) for _, docs in groupby(by_group, key=group.__getitem__))


def _spread_groups(documents: Documents, members: list[list[int]], count: int) -> list[list[int]]:
    category = np.array([documents.category[docs[0]] for docs in members], np.int64)
    return [members[index] for index in spread_over_categories(category, count)]


def spread_over_categories(category: Int[np.ndarray, " all"], count: int) -> list[int]:
    """Return `count` indices, evenly spaced except that each category has at least one.

    A missing category takes the last index of the largest one. If `count` is too small for that,
    some categories stay without an index, and the log has a warning.

    >>> spread_over_categories(np.array([0, 0, 0, 0, 0, 7, 0, 0]), 3)
    [0, 3, 5]
    """
    indices = np.linspace(0, len(category) - 1, count, dtype=int).tolist()
    for missing in np.setdiff1d(category, category[indices]).tolist() if count else ():
        largest, size = Counter(category[indices].tolist()).most_common(1)[0]
        if size == 1:
            log.warning("data: %d held-out prompts are too few for all categories", count)
            break
        last = max(index for index in indices if category[index] == largest)
        indices[indices.index(last)] = int(np.flatnonzero(category == missing)[0])
    return sorted(indices)


def _pick_turns(groups: list[list[int]]) -> list[int]:
    """Pick a document of each group: the first of group 0, the second of group 1, and so on."""
    return [docs[index % len(docs)] for index, docs in enumerate(groups)]
