"""Store documents in flat arrays, their tokens end to end, and rows that refer to them.

    Documents       ids, answer flags, document starts      5 bytes per token, 28 per document
    DocumentPiece   tokens [begin, end) of a document
    Packed          rows of pieces                          16 bytes per piece, 8 per row

Nothing is padded in storage; `Packed.batch` builds padded tensors on demand.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Int, UInt64

from data.sources.rows import LABELS, TokenizedDocument
from models.batch import Batch


@dataclass(kw_only=True)
class Documents:
    """Token ids of all documents, with a flag for each that is True for answer tokens."""

    ids: Int[np.ndarray, " tokens"]  # int32
    answer: Bool[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " ends"]  # int64: document i is tokens starts[i] to starts[i + 1]
    category: Int[np.ndarray, " documents"]  # int32: index into `categories`
    language: Int[np.ndarray, " documents"]  # int32: index into `languages`
    conversation: Int[np.ndarray, " documents"]  # int32: shared by its documents; negative: none
    first_question: UInt64[np.ndarray, " documents"]  # hash without system prompt; 0: unknown
    categories: list[str]
    languages: list[str]
    skipped: dict[str, int] = field(default_factory=dict)  # rows of the source left out, by reason

    @classmethod
    def from_documents(cls, documents: Iterable[TokenizedDocument]) -> "Documents":
        """Concatenate the documents in the order given."""
        ids, answer, starts = array("i"), array("B"), array("q", [0])
        category, language, conversation = array("i"), array("i"), array("i")
        first_question = array("Q")
        categories: dict[str, int] = {}
        languages: dict[str, int] = {}
        for number, document in enumerate(documents):
            ids.extend(document.ids)
            answer.extend(document.answer)
            starts.append(len(ids))
            category.append(categories.setdefault(document.category, len(categories)))
            language.append(languages.setdefault(document.language, len(languages)))
            first_question.append(document.first_question)
            # Without a conversation: ~number, which is negative and unique to the document.
            conversation.append(~number if document.conversation is None else document.conversation)
        return cls(
            ids=np.asarray(ids),
            answer=np.asarray(answer).view(bool),
            starts=np.asarray(starts).view(np.int64),
            category=np.asarray(category),
            language=np.asarray(language),
            conversation=np.asarray(conversation),
            first_question=np.asarray(first_question).view(np.uint64),
            categories=list(categories),
            languages=list(languages),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> TokenizedDocument:
        if not 0 <= number < len(self):
            raise IndexError(number)
        begin, end = self.starts[number : number + 2]
        conversation = int(self.conversation[number])
        return TokenizedDocument(
            ids=self.ids[begin:end].tolist(),
            answer=self.answer[begin:end].tolist(),
            category=self.categories[self.category[number]],
            language=self.languages[self.language[number]],
            conversation=None if conversation < 0 else conversation,
            first_question=int(self.first_question[number]),
        )

    def __iter__(self) -> Iterator[TokenizedDocument]:
        return map(self.__getitem__, range(len(self)))

    def head(self, count: int | None) -> "Documents":
        """Return the first `count` documents, or all of them for None."""
        starts = self.starts[: None if count is None else count + 1]
        tokens = slice(int(starts[-1]))
        labels = {name: getattr(self, name)[:count] for name in LABELS}
        return replace(self, ids=self.ids[tokens], answer=self.answer[tokens], starts=starts, **labels)

    def content_hash(self) -> str:
        """Return a hash of the token ids, the answer flags and the document starts."""
        return hash_arrays(self.ids, self.answer, self.starts)

    @property
    def lengths(self) -> Int[np.ndarray, " documents"]:
        return np.diff(self.starts)


def hash_arrays(*arrays: np.ndarray) -> str:
    """Return the xxh3 hash of the arrays' values, one array after the other."""
    values_hash = xxhash.xxh3_128()
    for values in arrays:
        values_hash.update(np.ascontiguousarray(values).data)
    return values_hash.hexdigest()


class DocumentPiece(NamedTuple):
    """Tokens [begin, end) of a document; those before `loss_begin` are context without loss."""

    document: int
    begin: int
    end: int
    loss_begin: int


@dataclass(kw_only=True)
class Packed:
    """Rows of one fixed length, each packed with pieces of documents."""

    documents: Documents
    table: Int[np.ndarray, "pieces 4"]  # int32: the fields of each DocumentPiece, row after row
    starts: Int[np.ndarray, " ends"]  # int64: row i is pieces starts[i] to starts[i + 1]
    length: int  # tokens
    overlap: int | None = None  # tokens of context of a later piece; None: documents are not split

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def document_numbers(self) -> Int[np.ndarray, " packed_documents"]:
        """Return the numbers of the documents that have a piece in a row, ascending."""
        return np.unique(self.table[:, 0])

    def content_hash(self) -> str:
        """Return a hash of all that a draft learns from: the documents and their places in rows."""
        return hash_arrays(self.documents.ids, self.documents.answer, self.documents.starts, self.table, self.starts)

    def pieces(self, rows: list[int]) -> list[list[DocumentPiece]]:
        """Return the pieces of each of these rows, from left to right."""
        tables = [self.table[self.starts[row] : self.starts[row + 1]] for row in rows]
        return [[DocumentPiece(*piece) for piece in table.tolist()] for table in tables]

    def batch(self, rows: list[int]) -> Batch:
        """Return the tensors of these rows; padding has token and position 0, document -1, no answer."""
        shape = (len(rows), self.length)
        ids, positions, document = np.zeros(shape, int), np.zeros(shape, int), np.full(shape, -1)
        answer, context = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, pieces in enumerate(self.pieces(rows)):
            left = 0
            for number, piece in enumerate(pieces):
                right = left + piece.end - piece.begin
                begin, end = self.documents.starts[piece.document] + (piece.begin, piece.end)
                ids[row, left:right] = self.documents.ids[begin:end]
                answer[row, left:right] = self.documents.answer[begin:end]
                document[row, left:right] = number
                positions[row, left:right] = np.arange(right - left)
                context[row, left : left + piece.loss_begin - piece.begin] = True
                left = right
        return Batch(
            input_ids=torch.from_numpy(ids),
            answer_mask=torch.from_numpy(answer),
            document_ids=torch.from_numpy(document),
            positions=torch.from_numpy(positions),
            context_mask=None if self.overlap is None else torch.from_numpy(context),
        )
