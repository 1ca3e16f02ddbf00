"""Prompts that must not be learned, and prompts that the target cannot read."""

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError

from data.conversations import MisfitError
from data.prepared import Row
from data.prompts import read
from models.errors import UserError

DEMO = "demo"  # in place of a file: the demo's own held-out prompts


def first_turns(file: str) -> list[str]:
    """How each prompt of a file begins."""
    if file == DEMO:
        from data.demo.prompts import held_out_prompts

        return [prompt.text for prompt in held_out_prompts()]
    return [_first_turn(row) for row in read(file, key="mixture.exclude")]


def _first_turn(row: dict[str, Any]) -> str:
    if "messages" in row:
        users = [m["content"] for m in row["messages"] if m["role"] == "user"]
        return str(users[0]) if users else ""
    return row["text"] if "text" in row else (row["turns"] or [""])[0]


def fitting(tokenizer: Any, most: int) -> Callable[[Row], None]:
    """Raises MisfitError for a row whose first prompt has more tokens than `most`."""

    def check(row: Row) -> None:
        if row.text is not None:
            ids = tokenizer(row.text, verbose=False)["input_ids"]
        else:
            ids = _rendered(tokenizer, first_prompt(row), row)
        if len(ids) > most:
            raise MisfitError(f"a prompt of more than {most:,} tokens")

    return check


def first_prompt(row: Row) -> list[dict[str, Any]]:
    """The messages before the first answer."""
    messages = row.messages or []
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: min(answers, default=len(messages))]


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], row: Row) -> list[int]:
    if tokenizer.chat_template is None:
        raise UserError(
            "target.name: must have a chat template for conversations, got one without; "
            "map a column of plain texts by mixture.sources.NAME.columns={text: THEIRS}"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tools=row.tools, add_generation_prompt=True, return_dict=True, **row.template
        )["input_ids"]
    except TemplateError as error:  # "roles must alternate" and the like
        raise MisfitError(f"refused by the chat template: {error}") from error
