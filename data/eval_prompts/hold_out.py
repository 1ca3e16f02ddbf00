"""Choose the conversations that a draft is judged by and never learns from.

    documents -> conversations that begin with the same prompt -> final, selection, or learned

Such a group leaves training as a whole: with data.turns=each a later turn of a held-back
conversation repeats its first one. A group of more than 1 % of the documents, such as plain texts
with one header, is never held back. Prompts of `final` make the report, those of `selection` choose
the checkpoint and tune the tree, and no prompt is among both.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np
import xxhash
from jaxtyping import Bool, Int

from data.packing.documents import Documents
from data.packing.pack import answers_in, cut

log = logging.getLogger(__name__)
FEW = 64  # documents that may be held back for one prompt, however few there are in all
TEXT_PROMPT = 16  # tokens of a plain text that are its prompt: its answer begins with its second


@dataclass(kw_only=True)
class HeldBack:
    """Numbers of the documents to learn from, and of those whose prompts are held back."""

    learned: Int[np.ndarray, " learned"]
    selection: list[int]
    final: list[int]
    groups: int  # that have a prompt which can be judged
    too_long: int  # groups without one


def hold_back(
    documents: Documents, *, selection: int, final: int, length: int, longest: int | None = None
) -> HeldBack:
    """Hold back at most half of the groups, spread over the data and all of its categories.

    `length` is that of a training row, `longest` that of the longest prompt that can be judged.
    """
    numbers = np.arange(len(documents))
    sizes = prompt_sizes(documents)
    usable = answers_in(documents, cut(documents.lengths, numbers, length, None)) > 0
    if longest is not None:
        usable &= sizes <= longest
    group = groups(documents, sizes)
    common = np.bincount(group) > max(FEW, len(documents) // 100)
    if common.any():
        log.info(
            "data: %d documents that begin like many others are not held back",
            common[group].sum(),
        )  # fmt: skip
    members = _members(group, numbers[usable & ~common[group]])
    room = len(members) // 2
    choosing = min(selection, round(room / 3) if final else room)
    judged = _spread(documents, members, min(final, room - choosing))
    taken = {docs[0] for docs in judged}
    others = [docs for docs in members if docs[0] not in taken]
    chosen = _spread(documents, others, choosing)
    held = [group[docs[0]] for docs in judged + chosen]
    if selection and usable.any() and not chosen:
        log.warning(
            "data: too little to hold prompts back: checkpoints are chosen on what it learns"
        )
        chosen = (others or _members(group, numbers[usable]))[:selection]
    return HeldBack(
        learned=numbers[~np.isin(group, held)], selection=_one_each(chosen),
        final=_one_each(judged), groups=len(members),
        too_long=len(np.unique(group[~common[group]])) - len(members),
    )  # fmt: skip


def prompt_sizes(documents: Documents) -> Int[np.ndarray, " documents"]:
    """Count the tokens of each document's prompt."""
    spans = zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True)
    sizes = (prompt_size(documents.answer[begin:end]) for begin, end in spans)
    return np.fromiter(sizes, np.int64, len(documents))


def prompt_size(answer: Bool[np.ndarray, " tokens"]) -> int:
    """Count the tokens before the first answer token; in a plain text, the first few.

    >>> prompt_size(np.array([False, False, True, True]))
    2
    >>> prompt_size(np.arange(100) > 0)
    16
    """
    begins = int(answer.argmax()) if len(answer) else 0
    return begins if begins > 1 else min(len(answer), TEXT_PROMPT)


def groups(
    documents: Documents, sizes: Int[np.ndarray, " documents"]
) -> Int[np.ndarray, " documents"]:
    """Number the documents so that conversations with the same first prompt share a number."""
    _, first, conversation = np.unique(
        documents.conversation, return_index=True, return_inverse=True
    )
    spans = zip(documents.starts[first].tolist(), sizes[first].tolist(), strict=True)
    signs = [
        xxhash.xxh3_64_intdigest(np.ascontiguousarray(documents.ids[begin : begin + size]).data)
        for begin, size in spans
    ]
    _, same = np.unique(np.array(signs, np.uint64), return_inverse=True)
    return same[conversation]


def _members(
    group: Int[np.ndarray, " documents"], chosen: Int[np.ndarray, " chosen"]
) -> list[list[int]]:
    """List the chosen documents of each group that has any, in the order of the data."""
    found: dict[int, list[int]] = {}
    for number in chosen.tolist():
        found.setdefault(int(group[number]), []).append(number)
    return list(found.values())


def _spread(documents: Documents, members: list[list[int]], count: int) -> list[list[int]]:
    category = np.array([documents.category[docs[0]] for docs in members], np.int64)
    return [members[place] for place in spread(category, count)]


def spread(category: Int[np.ndarray, " all"], count: int) -> list[int]:
    """Choose `count` places evenly, then give each category without one a place of the fullest.

    >>> spread(np.array([0, 0, 0, 0, 0, 7, 0, 0]), 3)
    [0, 3, 5]
    """
    places = np.linspace(0, len(category) - 1, count, dtype=int).tolist()
    for missing in np.setdiff1d(category, category[places]).tolist() if count else ():
        fullest, number = Counter(category[places].tolist()).most_common(1)[0]
        if number == 1:
            log.warning("data: %d held-out prompts are too few for all categories", count)
            break
        last = max(place for place in places if category[place] == fullest)
        places[places.index(last)] = int(np.flatnonzero(category == missing)[0])
    return sorted(places)


def _one_each(chosen: list[list[int]]) -> list[int]:
    """A document of each group: of one its first turn, of the next its second, and so on."""
    return [docs[place % len(docs)] for place, docs in enumerate(chosen)]
