"""The pieces of a text add up to it, whatever its tokens and wherever it ends."""

import pytest

from data.chat.text_stream import TextStream, split_text
from tests.support.models.tiny import byte_fallback_ids, byte_fallback_tokenizer, demo_target

TEXTS = ["def f(x): return x + 1", "na\u00efve \u65e5\u672c\u8a9e \U0001f642 end", "  a\n\n b"]


@pytest.mark.parametrize("text", [*TEXTS, "warm \U0001f976", "warm \ufffd"])
def test_pieces_add_up_to_a_text_that_ends_anywhere_in_a_character(text):
    """The whole text has the mark of an incomplete character there, so the pieces have it too."""
    tokenizer = demo_target().tokenizer
    ids = tokenizer(text)["input_ids"]
    for end in range(1, len(ids) + 1):
        pieces = list(split_text(tokenizer, ids[:end]))
        assert "".join(piece for _, piece in pieces) == tokenizer.decode(ids[:end])
        assert sum(count for count, _ in pieces) == end


def test_bytes_that_are_no_character_leave_the_text_before_and_behind_them():
    """The decoder takes back a line break before such a byte, which a stream has shown already."""
    tokenizer = byte_fallback_tokenizer(["a", "b"])
    ids = byte_fallback_ids(tokenizer, "a", b"\n\xf0", "b", "a")
    assert "".join(piece for _, piece in split_text(tokenizer, ids)) == "a\n\N{REPLACEMENT CHARACTER} b a"
    whole = byte_fallback_ids(tokenizer, b"\n", "\N{GRINNING FACE}".encode())
    assert list(split_text(tokenizer, whole)) == [(1, "\n"), (4, "\N{GRINNING FACE}")]


def test_a_tokenizer_without_rust_yields_its_text_at_the_end():
    class Letters:
        def decode(self, ids, *, skip_special_tokens):
            return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == 0))

    stream = TextStream(Letters(), skip_special_tokens=True)
    assert [stream.read(token) for token in (1, 0, 2)] == [None] * 3
    assert stream.finish() == "bc"
