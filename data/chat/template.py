"""A chat template with one conversation's arguments: what serving sends, and what comes back.

The prompt of a turn is rendered as serving renders it (`add_generation_prompt`). What the text has
beyond it once the answer is there, up to the end-of-turn token, the target generates:

    <user>Hi</user><model>                       the history's prompt
    <user>Hi</user><model>Hello<end>             with the answer
                          [--------]             the target's own
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.sources.row_formats import MisfitError
from models.errors import UserError

SWITCHES = ("enable_thinking", "thinking")  # what templates call the argument
PROBE = "PROBE"

Message = dict[str, Any]
Span = tuple[int, int]  # characters of the rendered text


@lru_cache(maxsize=4)  # some tokenizers have thousands
def markers(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Tokens added to the vocabulary that are no spaces: end-of-turn tokens are among them."""
    added: Any = tokenizer.get_added_vocab
    return {text: number for text, number in added().items() if text.strip()}


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template says of a conversation that it does not take: roles must alternate, ..."""
    try:
        yield
    except (TemplateError, TypeError) as error:  # a TypeError: a value that is not JSON
        raise MisfitError(f"refused by the chat template: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat template, and its arguments: tools and what else the row or the config says."""

    tokenizer: PreTrainedTokenizerBase
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                "data.format: conversations must meet a target with a chat template, got a "
                "tokenizer without one; use plain text (data.format=text) or ids "
                "(data.format=tokens)"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                "data.format: conversations must meet a tokenizer that reports character offsets, "
                f"got {type(self.tokenizer).__name__}; give ids and answer flags "
                "(data.format=tokens)"
            )

    @property
    def template(self) -> str:
        return self.tokenizer.get_chat_template(tools=self.arguments.get("tools"))

    def text(self, messages: list[Message], *, prompt: bool = False, **switched: bool) -> str:
        """The conversation so far; `prompt`: with what serving adds to have it continued."""
        arguments = {**self.arguments, **switched, "add_generation_prompt": prompt}
        with _refusals():
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    def marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """The text, and what the template marks with {% generation %}.

        The tokenizer's own `return_assistant_tokens_mask` maps the same marks to tokens, but runs
        to the end of the text where a mark ends in a space that belongs to no token.
        """
        arguments: Any = self.tokenizer.special_tokens_map | self.arguments
        with _refusals():
            rendered: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **arguments,
            )
        (text,), (marks,) = rendered
        return text, list(marks)

    def switches(self) -> Iterator[dict[str, bool]]:
        """How prompts may be asked for: as given; where nothing is said of it, without thinking.

        An empty thought is never the target's own: serving without thinking sends it in the prompt.
        """
        yield {}
        for name in SWITCHES:
            if name not in self.arguments and name in self.template:
                yield {name: False}

    def answer(self, history: list[Message], message: Message) -> tuple[str, str] | None:
        """The prompt, and what the target says to it. None where no text shows it.

        Some templates take back from the history what they wrote into the prompt, such as thoughts.
        The answer then shows after the last question alone, and must end the whole text too.
        """
        if found := self._beyond(history, message):
            return found[:2]
        questions = [said for said in history if said["role"] == "user"]
        if not questions or not (found := self._beyond(questions[-1:], message)):
            return None
        _, answer, switched = found
        prompt = self.text(history, prompt=True, **switched)
        header = prompt.removeprefix(self.text(history))
        whole = self.text([*history, message])
        return (prompt, answer) if whole.endswith(header + answer) else None

    def _beyond(
        self, history: list[Message], message: Message
    ) -> tuple[str, str, dict[str, bool]] | None:
        """A prompt, the least that the text has beyond one, and how to ask for that prompt."""
        answered = self.text([*history, message])
        found = []
        for switched in self.switches():
            prompt = self.text(history, prompt=True, **switched)
            if answered.startswith(prompt):
                found.append((prompt, answered[len(prompt) :], switched))
        if found and found[0][0] == self.text(history):
            self._refuse_header(history)
        return min(found, key=lambda one: len(one[1]), default=None)

    def _refuse_header(self, history: list[Message]) -> None:
        """Without a generation prompt nothing may stand between history and answer."""
        probed = self.text([*history, {"role": "assistant", "content": PROBE}])
        header = probed.removeprefix(self.text(history)).partition(PROBE)[0]
        if header.strip():
            raise UserError(
                "data.format: the chat template must know add_generation_prompt, got one that "
                f"writes the header of the answer with the answer, {header!r}; mark its answers "
                "with {% generation %}"
            )
