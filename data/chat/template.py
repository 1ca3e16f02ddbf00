"""Render conversations with a chat template, and split a text into prompt and answer (docs/masks.md)."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from data.sources.rows import RowRejectedError
from models.io.errors import first_line, require

if TYPE_CHECKING:  # prompts are checked before transformers is imported, which takes seconds
    from transformers import PreTrainedTokenizerBase

THINKING_SWITCHES = ("enable_thinking", "thinking")  # names of the argument in templates
PROBE_TEXT = "PROBE"

Message = dict[str, Any]
CharSpan = tuple[int, int]  # characters of the rendered text


@lru_cache(maxsize=4)  # some tokenizers have thousands of added tokens
def find_added_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Return the added tokens that are not blank, with their ids; end-of-turn tokens included."""
    get_added_vocab: Any = tokenizer.get_added_vocab
    return {text: token_id for text, token_id in get_added_vocab().items() if text.strip()}


@lru_cache(maxsize=4)
def find_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the added tokens that mark structure, such as the end of a turn, and are never part of a text."""
    decoder: Any = tokenizer.added_tokens_decoder
    return tuple(token.content for token in decoder.values() if token.special and token.content.strip())


def check_template_arguments(tokenizer: "PreTrainedTokenizerBase", arguments: dict[str, Any], key: str) -> None:
    """Raise UserError for an argument that the chat template does not name, and so would leave without effect."""
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    for name in arguments:
        near = difflib.get_close_matches(name, words, n=1)
        require(
            name in words or name in THINKING_SWITCHES,  # settings for many targets have these
            f"{key}.{name}: must be an argument that the chat template reads, got none of this name; "
            + (f"did you mean {near[0]}?" if near else "leave it out"),
        )


@contextmanager
def _reject_on_template_error() -> Iterator[None]:
    """Convert a template's own errors, such as "roles must alternate", to RowRejectedError."""
    try:
        yield
    except Exception as error:  # templates call methods of strings and lists, which raise any type
        raise RowRejectedError(f"rejected by the chat template: {first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's chat template, and its arguments: tools, and those of the row and the config."""

    tokenizer: "PreTrainedTokenizerBase"
    arguments: dict[str, Any] = field(default_factory=dict)
    _rendered: dict[Any, tuple[list[Message], str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            bool(self.tokenizer.chat_template),
            "data.format: conversations must meet a target with a chat template, got a tokenizer without one; use "
            "plain text (data.format=text) or ids (data.format=tokens)",
        )

    @property
    def source(self) -> str:
        with _reject_on_template_error():  # such as several templates of which none is the default
            return self.tokenizer.get_chat_template(tools=self.arguments.get("tools"))

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False, **switches: bool) -> str:
        """Return the rendered conversation; `add_generation_prompt` adds the next answer's header.

        `switches` override the template's arguments. Raises RowRejectedError if the template rejects the conversation.
        """
        # The turns of a conversation need the same texts. A message that is kept keeps its id.
        key = (add_generation_prompt, *switches.items(), *map(id, messages))
        if key not in self._rendered:
            arguments = {**self.arguments, **switches, "add_generation_prompt": add_generation_prompt}
            with _reject_on_template_error():
                text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
            self._rendered[key] = [*messages], text
        return self._rendered[key][1]

    def render_prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a prompt, as serving renders it; raise RowRejectedError if the template rejects it."""
        text = self.render(messages, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def render_with_marks(self, messages: list[Message]) -> tuple[str, list[CharSpan]]:
        """Return the rendered conversation and its spans marked with {% generation %}.

        The tokenizer's own `return_assistant_tokens_mask` maps the same marks to tokens, but its
        mask runs to the end of the text if a mark ends in a space that belongs to no token.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: Any = self.tokenizer.special_tokens_map | self.arguments
        with _reject_on_template_error():
            rendered: Any = render_jinja_template(
                conversations=[messages], chat_template=self.source, return_assistant_tokens_mask=True, **arguments
            )
        (text,), (marks,) = rendered
        return text, list(marks)

    def render_prompts(self, history: list[Message]) -> Iterator[tuple[str, dict[str, bool]]]:
        """Yield prompts of the next answer, each with the switches that override the arguments.

        The first has no switches; each other one turns thinking off by one argument that is not set: serving then sends
        the empty thought in the prompt.
        """
        names = [n for n in THINKING_SWITCHES if n not in self.arguments and n in self.source]
        for switches in ({}, *({name: False} for name in names)):
            yield self.render(history, add_generation_prompt=True, **switches), switches

    def split_answer(self, history: list[Message], message: Message) -> tuple[str, str]:
        """Return the prompt and the answer to it; raise RowRejectedError if no text shows both.

        Some templates drop from the history what they wrote into the prompt. The answer is then taken from a text with
        the last question only, and must end the full text too.
        """
        if split := self._split_shortest_answer(history, message):
            return split[:2]
        questions = [turn for turn in history if turn["role"] == "user"]
        if questions and (split := self._split_shortest_answer(questions[-1:], message)):
            _, answer, switches = split
            prompt = self.render(history, add_generation_prompt=True, **switches)
            header = prompt.removeprefix(self.render(history))
            if self.render([*history, message]).endswith(header + answer):
                return prompt, answer
        raise RowRejectedError("the chat template rewrites what it wrote before an answer")

    def _split_shortest_answer(
        self, history: list[Message], message: Message
    ) -> tuple[str, str, dict[str, bool]] | None:
        """Return the longest prompt that the text begins with, the answer and the switches; None without any."""
        text = self.render([*history, message])
        splits = [
            (prompt, text[len(prompt) :], switches)
            for prompt, switches in self.render_prompts(history)
            if text.startswith(prompt)
        ]
        if splits and splits[0][0] == self.render(history):
            # Without a generation prompt, no header may precede the answer.
            probe = self.render([*history, {"role": "assistant", "content": PROBE_TEXT}])
            header = probe.removeprefix(splits[0][0]).partition(PROBE_TEXT)[0]
            require(
                not header.strip(),
                "data.format: the chat template must support add_generation_prompt, got one that writes the header of "
                f"the answer with the answer, {header!r}; mark its answers with {{% generation %}}",
            )
        return min(splits, key=lambda split: len(split[1]), default=None)
