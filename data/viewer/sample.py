"""Which documents of the data are shown, or which of the rows that training makes of them."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

from data.config import DataConf
from data.packing.documents import Documents
from data.packing.pack import pack
from data.sources.row_formats import Tokenised
from data.viewer.documents import Look, Shown, about, shown

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
        Look(f"document {number:,}", about(document), list(shown(tokenizer, document)))
        for number, document in chosen
    ]


def some_rows(
    found: Documents, conf: DataConf, count: int, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> Iterator[Look]:
    """Rows as training packs the documents."""
    packed, _ = pack(found, conf.length, overlap=conf.overlap)
    rows = random.Random(seed).sample(range(len(packed)), min(count, len(packed)))
    for row in sorted(rows):
        [parts] = packed.pieces([row])
        pieces, whole = [], Tokenised(ids=[], answer=[])
        for part in parts:
            document = found[part.document]
            context = [False] * (part.learns - part.begin)
            some = Tokenised(
                ids=document.ids[part.begin : part.end],
                answer=context + document.answer[part.learns : part.end],
            )
            whole.ids += some.ids
            whole.answer += some.answer
            heading = f"--- document {part.document:,} ---\n"
            pieces += [Shown(heading, (), False, left_out=True), *shown(tokenizer, some)]
            pieces += [Shown("\n", (), False, left_out=True)]
        held = f"{len(parts)} documents in {conf.length:,} positions, {about(whole)}"
        yield Look(f"row {row:,} of {len(packed):,}", held, pieces)
