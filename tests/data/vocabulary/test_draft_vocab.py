"""The reduced draft vocabulary holds every required token and fills up with the most frequent tokens."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.vocabulary import draft_vocab
from models.io.errors import UserError
from tests.support.models.tiny import byte_tokenizer

COUNTS = torch.tensor([0, 50, 3, 0, 40, 0, 7, 0])


@pytest.mark.parametrize(
    ("size", "required", "kept"),
    [
        (4, [7, 0], [0, 1, 4, 7]),
        (3, [1], [1, 4, 6]),  # a required token counts once, however frequent it is
        (6, [7], [0, 1, 2, 4, 6, 7]),  # unused tokens fill up by ascending id
        (2, [7, 8], [1, 7]),  # a required token without a row in the head is left out
    ],
)
def test_required_tokens_and_the_most_frequent_others_stand_in_ascending_order(size, required, kept):
    assert draft_vocab.choose_kept_ids(COUNTS, size, required_ids=required).tolist() == kept


def test_the_full_size_keeps_every_token():
    ids = draft_vocab.choose_kept_ids(COUNTS, len(COUNTS), required_ids=[3])
    assert ids.tolist() == list(range(len(COUNTS)))
    assert draft_vocab.token_coverage(COUNTS, ids) == 1.0


@pytest.mark.parametrize("size", [2, 9])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(UserError, match=rf"draft\.vocab_size: must .* got {size}"):
        draft_vocab.choose_kept_ids(COUNTS, size, required_ids=[0, 1, 2])


def test_coverage_is_the_share_of_answer_tokens():
    assert draft_vocab.token_coverage(COUNTS, torch.tensor([1, 4])) == pytest.approx(0.9)


def test_every_byte_and_special_token_of_a_byte_level_tokenizer_is_required():
    tokenizer = byte_tokenizer(["<end>"], template=None, eos_token="<end>")
    tokenizer.add_tokens(["<call>"])
    ids = draft_vocab.required_token_ids(tokenizer)
    assert len(ids) == 256 + 2
    spelled = tokenizer("\x00 \x7f \u00ff \U0001f600<call><end>").input_ids
    assert set(spelled) <= set(ids)
    assert len(ids) < len(tokenizer)


def test_every_byte_fallback_token_is_required():
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    assert draft_vocab.required_token_ids(tokenizer) == [*range(1, 258)]
