"""Random samples for `python -m data.show`: documents, or the packed rows of training."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from transformers import PreTrainedTokenizerBase

from data.config import DataConf
from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.row_formats import TokenizedDocument
from data.viewer.documents import DocumentView, TokenSpan, describe_document, split_into_spans

NumberedDocument = tuple[int, TokenizedDocument]


def sample_documents(
    documents: Iterable[TokenizedDocument], count: int, tokenizer: PreTrainedTokenizerBase, *,
    seed: int,
) -> list[DocumentView]:  # fmt: skip
    """Sample documents from the categories in turn, uniformly within each category."""
    rng = random.Random(seed)
    reservoirs: defaultdict[str, list[NumberedDocument]] = defaultdict(list)
    sizes: defaultdict[str, int] = defaultdict(int)
    for number, document in enumerate(documents):
        reservoir = reservoirs[document.category]
        sizes[document.category] += 1
        if len(reservoir) < count:
            reservoir.append((number, document))
        elif (index := rng.randrange(sizes[document.category])) < count:
            reservoir[index] = (number, document)
    in_turn = [
        numbered
        for turn in zip_longest(*reservoirs.values())
        for numbered in turn
        if numbered is not None
    ]
    sample = sorted(in_turn[:count], key=lambda numbered: numbered[0])
    return [
        DocumentView(
            f"document {number:,}",
            describe_document(document),
            list(split_into_spans(tokenizer, document)),
        )
        for number, document in sample
    ]


def sample_rows(
    documents: Documents, conf: DataConf, count: int, tokenizer: PreTrainedTokenizerBase, *,
    seed: int,
) -> Iterator[DocumentView]:  # fmt: skip
    """Sample rows as training packs the documents."""
    packed, _ = pack_documents(documents, conf.length, overlap=conf.overlap)
    rows = random.Random(seed).sample(range(len(packed)), min(count, len(packed)))
    for row in sorted(rows):
        [pieces] = packed.pieces([row])
        spans, row_tokens = [], TokenizedDocument(ids=[], answer=[])
        for piece in pieces:
            document = documents[piece.document]
            context = [False] * (piece.loss_begin - piece.begin)
            piece_tokens = TokenizedDocument(
                ids=document.ids[piece.begin : piece.end],
                answer=context + document.answer[piece.loss_begin : piece.end],
            )
            row_tokens.ids += piece_tokens.ids
            row_tokens.answer += piece_tokens.answer
            heading = f"--- document {piece.document:,} ---\n"
            spans += [
                TokenSpan(heading, (), False, left_out=True),
                *split_into_spans(tokenizer, piece_tokens),
            ]
            spans += [TokenSpan("\n", (), False, left_out=True)]
        description = (
            f"{len(pieces)} documents in {conf.length:,} positions, {describe_document(row_tokens)}"
        )
        yield DocumentView(f"row {row:,} of {len(packed):,}", description, spans)
