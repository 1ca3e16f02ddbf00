"""Long documents in overlapping pieces: every answer token is learned once, where a method may."""

import pytest
import torch

from conf.entry import compose
from data.packing.documents import DocumentPiece, Documents
from data.packing.pack import pack_documents
from data.sources.rows import TokenizedDocument
from models.io.errors import UserError
from models.losses.config import LossConf, Reduction
from models.losses.loss_weights import position_weights, token_weights
from tests.support.models.methods import CASES
from tests.support.models.tiny import tiny_target
from train.config.run import TrainConf

LENGTH, OVERLAP, STEPS = 16, 6, 4
TOKEN = LossConf(reduction=Reduction.token, step_decay=0.8)


def conversation(*turns: int) -> TokenizedDocument:
    """A prompt of so many tokens, an answer of so many, a prompt ... Token t is called t."""
    answer = [turn % 2 == 1 for turn, size in enumerate(turns) for _ in range(size)]
    return TokenizedDocument(ids=list(range(len(answer))), answer=answer)


LONG = [
    conversation(5, 60),  # one answer over several pieces
    conversation(3, 10, 30, 9, 2, 7),  # a piece of prompt alone
    conversation(30, 1, 1, 1, 1, 14),
    conversation(4, 12),  # fills a row
    conversation(4, 13),  # one token too many
]


def learned(document: TokenizedDocument, length: int, overlap: int | None) -> list[dict]:
    """What a language model and heads learn: the weight of each (row, step) by token drafted."""
    packed, _ = pack_documents(Documents.from_documents([document]), length, overlap=overlap)
    sums: list[dict] = [{}, {}]
    for row in range(len(packed)):
        batch = packed.batch([row])
        said = {"conf": TOKEN, "context_mask": batch.context_mask}
        ((token,), _) = token_weights(batch.answer_mask, batch.document_ids, **said)
        (heads, _) = position_weights(batch.answer_mask, batch.document_ids, steps=STEPS, **said)
        for found, weights, first in ((sums[0], token[None], 1), (sums[1], heads[:, 0], 2)):
            for step, place in weights.nonzero().tolist():
                at = int(batch.input_ids[0, place])
                assert int(batch.input_ids[0, place + first + step]) == at + first + step
                assert (at, step) not in found  # never twice
                found[at, step] = float(weights[step, place])
    return sums


@pytest.mark.parametrize("document", LONG, ids=lambda d: f"{len(d.ids)} tokens")
@pytest.mark.parametrize("overlap", [STEPS + 1, OVERLAP, LENGTH // 2])
def test_a_split_document_teaches_what_it_does_whole(document, overlap):
    """Each head's every row, with the same weight."""
    assert learned(document, LENGTH, overlap) == learned(document, 128, None)


def test_pieces_begin_with_the_end_of_the_one_before():
    documents = Documents.from_documents([conversation(5, 25)])
    packed, report = pack_documents(documents, LENGTH, overlap=OVERLAP)
    pieces = sorted(piece for row in packed.pieces([0, 1, 2]) for piece in row)
    assert pieces == [DocumentPiece(0, 0, 16, 0), DocumentPiece(0, 10, 26, 16), DocumentPiece(0, 20, 30, 26)]
    assert (report.split, report.truncated, report.repeated) == (1, 0, 12 / 42)
    assert report.supervised == 25 / 42
    assert "1 split (28.6% of the tokens repeated)" in str(report)
    whole, _ = pack_documents(Documents.from_documents([conversation(5, 5)]), LENGTH, overlap=OVERLAP)
    assert not whole.batch([0]).context_mask.any()


def test_a_piece_without_an_answer_is_left_out():
    packed, report = pack_documents(Documents.from_documents([conversation(3, 10, 40, 3)]), LENGTH, overlap=OVERLAP)
    begins = sorted(piece.begin for row in packed.pieces([0, 1]) for piece in row)
    assert (len(packed), begins) == (2, [0, 40])
    assert (report.documents, report.split, report.dropped) == (1, 1, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_method_says_without_a_target_whether_it_reads_context(name):
    case = CASES[name]
    assert case.build(tiny_target(seed=0)).needs.context == case.conf.needs_context


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft=demo"], "data.overlap: must be null for eagle3, which reads what the target"),
        (["draft=demo-medusa"], "data.overlap: must be above the 4 tokens that"),
        (
            ["draft=demo-medusa", "data.overlap=32", "loss.half_life=8"],
            "data.overlap: must be null with data.on_policy.share or loss.half_life",
        ),
        (["draft=demo-medusa", "data.overlap=400"], "data.overlap: must be 1 to half of data."),
    ],
)
def test_an_overlap_that_would_teach_wrongly_is_refused(overrides, message):
    with pytest.raises(UserError) as refused:
        compose("train", TrainConf, ["data.overlap=4", *overrides]).check_settings()
    assert str(refused.value).startswith(message)


def test_the_context_is_read_where_it_is_not_learned():
    """The first learned token of a later piece has the same tokens before it as in the text."""
    packed, _ = pack_documents(Documents.from_documents([conversation(5, 25)]), LENGTH, overlap=OVERLAP)
    second = next(row for row in range(3) if packed.pieces([row])[0][0].begin == 10)
    batch = packed.batch([second])
    first = int((~batch.context_mask[0]).int().argmax())
    assert torch.equal(batch.input_ids[0, :first], torch.arange(10, 16))
    assert batch.attention_mask()[0, 0, first, : first + 1].all()
