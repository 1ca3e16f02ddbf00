"""Every answer token of a long document in overlapping pieces is learned once."""

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


def build_conversation(*turns: int) -> TokenizedDocument:
    """Return a document of a prompt, an answer, a prompt ... of these lengths; the id of token t is t."""
    answer = [turn % 2 == 1 for turn, size in enumerate(turns) for _ in range(size)]
    return TokenizedDocument(ids=list(range(len(answer))), answer=answer)


LONG = [
    build_conversation(5, 60),  # one answer over several pieces
    build_conversation(3, 10, 30, 9, 2, 7),  # a piece of prompt alone
    build_conversation(30, 1, 1, 1, 1, 14),
    build_conversation(4, 12),  # fills a row
    build_conversation(4, 13),  # one token too many
]


def list_learned_weights(document: TokenizedDocument, length: int, overlap: int | None) -> list[dict]:
    """Return the weight of each drafted token by (token, step), for a language model and for heads."""
    packed, _ = pack_documents(Documents.from_documents([document]), length, overlap=overlap)
    sums: list[dict] = [{}, {}]
    for row in range(len(packed)):
        batch = packed.batch([row])
        ((token,), _) = token_weights(batch, conf=TOKEN)
        (heads, _) = position_weights(batch, steps=STEPS, conf=TOKEN)
        for weights_by_token, weights, first in ((sums[0], token[None], 1), (sums[1], heads[:, 0], 2)):
            for step, position in weights.nonzero().tolist():
                token_id = int(batch.input_ids[0, position])
                assert int(batch.input_ids[0, position + first + step]) == token_id + first + step
                assert (token_id, step) not in weights_by_token  # never twice
                weights_by_token[token_id, step] = float(weights[step, position])
    return sums


@pytest.mark.parametrize("document", LONG, ids=lambda d: f"{len(d.ids)} tokens")
@pytest.mark.parametrize("overlap", [STEPS + 1, OVERLAP, LENGTH // 2])
def test_a_split_document_teaches_the_same_tokens_as_an_unsplit_one(document, overlap):
    """Every token of each head has the same weight."""
    assert list_learned_weights(document, LENGTH, overlap) == list_learned_weights(document, 128, None)


def test_pieces_begin_with_the_end_of_the_piece_before():
    documents = Documents.from_documents([build_conversation(5, 25)])
    packed, report = pack_documents(documents, LENGTH, overlap=OVERLAP)
    pieces = sorted(piece for row in packed.pieces([0, 1, 2]) for piece in row)
    assert pieces == [DocumentPiece(0, 0, 16, 0), DocumentPiece(0, 10, 26, 16), DocumentPiece(0, 20, 30, 26)]
    assert (report.split, report.truncated, report.repeated) == (1, 0, 12 / 42)
    assert report.supervised == 25 / 42
    assert "1 split (28.6% of the tokens repeated)" in str(report)
    unsplit, _ = pack_documents(Documents.from_documents([build_conversation(5, 5)]), LENGTH, overlap=OVERLAP)
    assert not unsplit.batch([0]).context_mask.any()


def test_a_piece_without_an_answer_is_left_out():
    packed, report = pack_documents(
        Documents.from_documents([build_conversation(3, 10, 40, 3)]), LENGTH, overlap=OVERLAP
    )
    begins = sorted(piece.begin for row in packed.pieces([0, 1]) for piece in row)
    assert (len(packed), begins) == (2, [0, 40])
    assert (report.documents, report.split, report.dropped) == (1, 1, 0)


@pytest.mark.parametrize("name", CASES)
def test_the_options_of_a_method_say_whether_it_reads_context(name):
    case = CASES[name]
    assert case.build(tiny_target(seed=0)).needs.context == case.conf.needs_context


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft=demo"], "data.overlap: must be null for eagle3, got "),
        (["draft=demo-medusa"], "data.overlap: must be above the 4 tokens that"),
        (
            ["draft=demo-lm", "data.overlap=32", "data.on_policy.share=0.5"],
            "data.overlap: must be null with data.on_policy.share",
        ),
        (["draft=demo-medusa", "data.overlap=0"], "data.overlap: must be 1 to half of data.row_length=256, got 0"),
        (["draft=demo-medusa", "data.overlap=129"], "data.overlap: must be 1 to half of data.row_length=256, got 129"),
    ],
)
def test_an_overlap_that_does_not_suit_the_draft_or_the_loss_is_refused(overrides, message):
    with pytest.raises(UserError) as refused:
        compose("train", TrainConf, ["data.overlap=4", *overrides]).check_settings()
    assert str(refused.value).startswith(message)


def test_the_context_is_read_where_it_is_not_learned():
    """The first learned token of a later piece has the same tokens before it as in the text."""
    packed, _ = pack_documents(Documents.from_documents([build_conversation(5, 25)]), LENGTH, overlap=OVERLAP)
    second = next(row for row in range(3) if packed.pieces([row])[0][0].begin == 10)
    batch = packed.batch([second])
    first = int((~batch.context_mask[0]).int().argmax())
    assert torch.equal(batch.input_ids[0, :first], torch.arange(10, 16))
    assert batch.attention_mask()[0, 0, first, : first + 1].all()
