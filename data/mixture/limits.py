"""Prompts that must not be learned, and prompts that the target cannot read."""

from collections.abc import Callable
from typing import Any

from data.chat.template import Chat
from data.config import DEMO
from data.eval_prompts.prompts import read
from data.sources.prepared_rows import Row
from data.sources.row_formats import MisfitError, plain
from models.errors import UserError


def first_turns(file: str) -> list[str]:
    """How each prompt of a file begins."""
    if file == DEMO:
        from data.demo.prompts import held_out_prompts

        return [prompt.text for prompt in held_out_prompts()]
    return [_first_turn(row) for row in read(file, key="mixture.exclude")]


def _first_turn(row: dict[str, Any]) -> str:
    if "ids" in row:
        raise UserError(
            f"mixture.exclude: every prompt must be text, got token ids for id {row['id']}; "
            "give the file that they were made from"
        )
    if "messages" in row:
        users = [m["content"] for m in row["messages"] if m["role"] == "user"]
        return _said(users[0], row["id"]) if users else ""
    return row["text"] if "text" in row else (row["turns"] or [""])[0]


def _said(content: Any, row_id: str) -> str:
    try:
        return plain(content)
    except MisfitError as error:
        raise UserError(
            f"mixture.exclude: every prompt must be text, got {error} for id {row_id}"
        ) from error


def fitting(tokenizer: Any, most: int | None) -> Callable[[Row], None]:
    """Raises MisfitError for a row whose first prompt cannot be had or is longer than `most`."""

    def check(row: Row) -> None:
        if row.text is not None:
            ids = tokenizer(row.text, verbose=False)["input_ids"]
        else:
            _refuse_without_template(tokenizer)
            chat = Chat(tokenizer=tokenizer, arguments={**row.template, "tools": row.tools})
            prompt = chat.text(first_prompt(row), prompt=True)
            ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if most is not None and len(ids) > most:
            raise MisfitError(f"a prompt of more than {most:,} tokens")

    return check


def first_prompt(row: Row) -> list[dict[str, Any]]:
    """The messages before the first answer."""
    messages = row.messages or []
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: min(answers, default=len(messages))]


def _refuse_without_template(tokenizer: Any) -> None:
    if tokenizer.chat_template is None:
        raise UserError(
            "target.name: must have a chat template for conversations, got one without; "
            "map a column of plain texts by +mixture.sources.NAME.columns.text=THEIRS"
        )
