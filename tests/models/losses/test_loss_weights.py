"""Rows have the weights that are computed here by hand."""

import torch

from models.batch import Batch
from models.losses.config import LossConf, Reduction
from models.losses.loss_weights import position_weights, shift_right, token_weights

# a document of two answers (3 and 2 tokens), a document of an answer of 4, and padding
ANSWER = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0]]).bool()
DOCUMENT = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1]])
TOKEN = Reduction.token


def build_batch(answer_mask, document_ids):
    """Return rows of which only answers and documents are read."""
    unread = torch.zeros_like(document_ids)
    return Batch(input_ids=unread, answer_mask=answer_mask, document_ids=document_ids, positions=unread)


ROW = build_batch(ANSWER, DOCUMENT)


def assert_close(actual, expected):
    torch.testing.assert_close(actual.flatten(), torch.tensor(expected, dtype=torch.float32))


def test_a_language_model_learns_every_answer_token():
    """Row t learns token t+1, but neither the first token of the next document nor padding."""
    weight, total = token_weights(ROW, conf=LossConf(reduction=TOKEN))
    assert_close(weight, [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0])
    assert total == 8


def test_prompts_can_be_learned_like_answers():
    """The weights are those of a text that is all answer; padding has none."""
    conf = LossConf(reduction=TOKEN, on_prompts=True, step_decay=0.8)
    answers_only = LossConf(reduction=TOKEN, step_decay=0.8)
    everything = build_batch(DOCUMENT >= 0, DOCUMENT)
    for weigh, steps in ((token_weights, {}), (position_weights, {"steps": 2})):
        weight, total = weigh(ROW, conf=conf, **steps)
        expected, expected_total = weigh(everything, conf=answers_only, **steps)
        torch.testing.assert_close(weight, expected)
        assert total == expected_total > weigh(ROW, conf=answers_only, **steps)[1]


def test_a_shift_beyond_a_short_row_leaves_zeros():
    row = torch.arange(1, 5)[None]
    assert shift_right(row, 1).tolist() == [[0, 1, 2, 3]]
    for by in (4, 7):
        assert shift_right(row, by).tolist() == [[0, 0, 0, 0]]


def test_a_drafted_position_has_the_weight_of_its_token():
    """Row t drafts token t+2 at step 0 and t+3 at step 1, which decays."""
    weight, total = position_weights(ROW, steps=2, conf=LossConf(reduction=TOKEN, step_decay=0.8))
    assert_close(weight[0], [1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0])
    assert_close(weight[1], [0.8, 0, 0, 0, 0, 0, 0, 0, 0.8, 0, 0, 0, 0])
    assert total == 5


def test_the_weights_of_each_document_sum_to_1():
    """The sum depends on neither length nor number of answers; a document without answers weighs nothing."""
    conf = LossConf(step_decay=1.0)
    answer = torch.cat([ANSWER, torch.zeros_like(ANSWER)])
    rows = build_batch(answer, torch.cat([DOCUMENT, DOCUMENT]))
    for weight, total in (token_weights(rows, conf=conf), position_weights(rows, steps=3, conf=conf)):
        first = weight.reshape(-1, *answer.shape)[0]
        assert_close(first[0, :8].sum(), [1])
        assert_close(first[0, 8:].sum(), [1])
        assert not first[1].any()
        assert_close(total, [2])
