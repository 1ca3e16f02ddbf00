"""The text of tokens that arrive one after the other, without a character cut in two."""

from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of tokens, piece by piece; the pieces add up to the decoded text.

    The bytes of a character that several tokens share come with the last of them. The text of a
    tokenizer that is not written in Rust comes at the end.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = False):
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self.skip_special_tokens = skip_special_tokens
        self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.ids: list[int] = []
        self.text = ""

    def read(self, token: int) -> str | None:
        """Return the text that a token completes, or None if it is within a character."""
        self.ids.append(token)
        if self.backend is None:
            return None
        try:
            text = self.stream.step(self.backend, token)
        # tokenizers raises no class of its own for bytes that are not UTF-8 and change the text before them.
        except Exception:  # noqa: BLE001
            self.stream = DecodeStream(ids=[token], skip_special_tokens=self.skip_special_tokens)
            text = self.finish()
        self.text += text or ""
        return text

    def finish(self) -> str:
        """Return the text of the last tokens if they end within a character."""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens)
        return text[len(self.text) :]


def split_text(tokenizer: Any, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield the number of tokens of each piece of a text, and the piece."""
    stream, num_tokens = TextStream(tokenizer), 0
    for token in ids:
        num_tokens += 1
        if (text := stream.read(token)) is not None:
            yield num_tokens, text
            num_tokens = 0
    if num_tokens:
        yield num_tokens, stream.finish()
