"""Documents as they are kept: their tokens end to end in flat arrays, and rows that point at them.

    Documents   ids, answer flags, where each document starts      5 bytes a token, 20 a document
    Piece       tokens [begin, end) of a document
    Packed      rows of pieces                                     16 bytes a piece, 8 a row

Nothing is padded here. Tensors are made when a batch is asked for.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.chat import tokenization
from data.config import DataConf
from data.sources.row_formats import Tokenised
from models.drafts.base import Batch


@dataclass(kw_only=True)
class Documents:
    """Token ids of all documents, and which of them are answer tokens."""

    ids: Int[np.ndarray, " tokens"]  # int32
    answer: Bool[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " ends"]  # int64: document i is tokens starts[i] to starts[i + 1]
    category: Int[np.ndarray, " documents"]  # int32: its place in `categories`
    language: Int[np.ndarray, " documents"]  # int32: its place in `languages`
    conversation: Int[np.ndarray, " documents"]  # int32: shared by its documents; < 0: of none
    categories: list[str]
    languages: list[str]

    @classmethod
    def of(cls, pieces: Iterable[Tokenised]) -> "Documents":
        """All of these, one after another."""
        ids, answer, starts = array("i"), array("B"), array("q", [0])
        category, language, conversation = array("i"), array("i"), array("i")
        categories: dict[str, int] = {}
        languages: dict[str, int] = {}
        for number, piece in enumerate(pieces):
            ids.extend(piece.ids)
            answer.extend(piece.answer)
            starts.append(len(ids))
            category.append(categories.setdefault(piece.category, len(categories)))
            language.append(languages.setdefault(piece.language, len(languages)))
            conversation.append(~number if piece.conversation is None else piece.conversation)
        return cls(
            ids=np.asarray(ids), answer=np.asarray(answer).view(bool),
            starts=np.asarray(starts).view(np.int64),
            category=np.asarray(category), language=np.asarray(language),
            conversation=np.asarray(conversation),
            categories=list(categories), languages=list(languages),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Tokenised:
        if not 0 <= number < len(self):
            raise IndexError(number)
        begin, end = self.starts[number : number + 2]
        conversation = int(self.conversation[number])
        return Tokenised(
            ids=self.ids[begin:end].tolist(),
            answer=self.answer[begin:end].tolist(),
            category=self.categories[self.category[number]],
            language=self.languages[self.language[number]],
            conversation=None if conversation < 0 else conversation,
        )

    def __iter__(self) -> Iterator[Tokenised]:
        return map(self.__getitem__, range(len(self)))

    def head(self, count: int | None) -> "Documents":
        """The first so many; None: all."""
        starts = self.starts[: None if count is None else count + 1]
        tokens = slice(int(starts[-1]))
        return replace(
            self, ids=self.ids[tokens], answer=self.answer[tokens], starts=starts,
            category=self.category[:count], language=self.language[:count],
            conversation=self.conversation[:count],
        )  # fmt: skip

    @property
    def lengths(self) -> Int[np.ndarray, " documents"]:
        return np.diff(self.starts)


def read(conf: DataConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]) -> Documents:
    """The data of the conf, tokenised; `skipped` counts the rows left out, by reason."""
    found = tokenization.documents(conf, tokenizer, skipped)
    progress = tqdm(found, desc="tokenise", unit=" documents", disable=None)
    return Documents.of(iter(progress))


class Piece(NamedTuple):
    """Tokens [begin, end) of a document. Those before `learns` are context that is not learned."""

    document: int
    begin: int
    end: int
    learns: int


@dataclass(kw_only=True)
class Packed:
    """Rows of one fixed length, each of several pieces."""

    documents: Documents
    table: Int[np.ndarray, "pieces 4"]  # int32: the fields of each Piece, row after row
    starts: Int[np.ndarray, " ends"]  # int64: row i is pieces starts[i] to starts[i + 1]
    length: int
    pad_id: int = 0
    overlap: int | None = None  # context of a later piece; None: documents are not split

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def document_numbers(self) -> Int[np.ndarray, " learned"]:
        """Numbers of the documents that have a piece in a row, ascending."""
        return np.unique(self.table[:, 0])

    def pieces(self, rows: list[int]) -> list[list[Piece]]:
        """What lies in these rows, from left to right."""
        tables = [self.table[self.starts[row] : self.starts[row + 1]] for row in rows]
        return [[Piece(*piece) for piece in table.tolist()] for table in tables]

    def batch(self, rows: list[int]) -> Batch:
        """These rows as tensors. Padding has position 0, document -1 and no answer."""
        shape = (len(rows), self.length)
        ids, document = np.full(shape, self.pad_id), np.full(shape, -1)
        answer, context, positions = (np.zeros(shape, kind) for kind in (bool, bool, int))
        for row, pieces in enumerate(self.pieces(rows)):
            left = 0
            for number, piece in enumerate(pieces):
                right = left + piece.end - piece.begin
                begin, end = self.documents.starts[piece.document] + (piece.begin, piece.end)
                ids[row, left:right] = self.documents.ids[begin:end]
                answer[row, left:right] = self.documents.answer[begin:end]
                document[row, left:right] = number
                positions[row, left:right] = np.arange(right - left)
                context[row, left : left + piece.learns - piece.begin] = True
                left = right
        return Batch(
            ids=torch.from_numpy(ids), answer=torch.from_numpy(answer),
            document=torch.from_numpy(document), positions=torch.from_numpy(positions),
            context=None if self.overlap is None else torch.from_numpy(context),
        )  # fmt: skip
