"""Which documents of the data are shown, or which of the rows that training makes of them."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

from data.conversations import Tokenised
from data.documents import Documents
from data.packing import pack
from data.shown.documents import Look, Shown, shown, title

Numbered = tuple[int, Tokenised]


def some_documents(
    found: Iterable[Tokenised], count: int, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> list[Look]:
    """Of all categories in turn; of one category each document is as likely as another."""
    rng = random.Random(seed)
    kept: defaultdict[str, list[Numbered]] = defaultdict(list)
    seen: defaultdict[str, int] = defaultdict(int)
    for number, document in enumerate(found):
        some = kept[document.category]
        seen[document.category] += 1
        if len(some) < count:
            some.append((number, document))
        elif (place := rng.randrange(seen[document.category])) < count:
            some[place] = (number, document)
    in_turn = [one for turn in zip_longest(*kept.values()) for one in turn if one is not None]
    chosen = sorted(in_turn[:count], key=lambda one: one[0])
    return [
        Look(title(f"document {number:,}", document), list(shown(tokenizer, document)))
        for number, document in chosen
    ]


def some_rows(
    found: Documents, length: int, count: int, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> Iterator[Look]:
    """Rows as training packs the documents."""
    packed, _ = pack(found, length)
    rows = random.Random(seed).sample(range(len(packed)), min(count, len(packed)))
    for row in sorted(rows):
        [parts] = packed.pieces([row])
        pieces, ids, answer = [], [], []
        for part in parts:
            document = found[part.document]
            some = Tokenised(
                ids=document.ids[part.begin : part.end],
                answer=document.answer[part.begin : part.end],
            )
            ids, answer = ids + some.ids, answer + some.answer
            heading = f"--- document {part.document:,} ---\n"
            pieces += [Shown(heading, (), False, left_out=True), *shown(tokenizer, some)]
            pieces += [Shown("\n", (), False, left_out=True)]
        name = f"row {row:,} of {len(packed):,}, {len(parts)} documents in {length:,} positions"
        yield Look(title(name, Tokenised(ids=ids, answer=answer)), pieces)
