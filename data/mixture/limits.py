"""Prompts to exclude from training, and the limit on the length of a prompt."""

from collections.abc import Callable
from typing import Any

from data.chat.template import ChatTemplate
from data.config import DEMO
from data.eval_prompts.prompts import read_prompt_rows
from data.sources.prepared_rows import PreparedRow
from data.sources.row_formats import RowRejectedError, text_from_content
from models.errors import UserError


def read_first_turns(file: str) -> list[str]:
    """Return the first turn of each prompt of a file; `demo` stands for the demo's prompts."""
    if file == DEMO:
        from data.demo.prompts import held_out_prompts

        return [prompt.text for prompt in held_out_prompts()]
    return [_extract_first_turn(row) for row in read_prompt_rows(file, key="mixture.exclude")]


def _extract_first_turn(row: dict[str, Any]) -> str:
    if "ids" in row:
        raise UserError(
            f"mixture.exclude: every prompt must be text, got token ids for id {row['id']}; "
            "give the file of texts that they came from"
        )
    if "messages" in row:
        contents = [m["content"] for m in row["messages"] if m["role"] == "user"]
        return _text_from_content(contents[0], row["id"]) if contents else ""
    return row["text"] if "text" in row else (row["turns"] or [""])[0]


def _text_from_content(content: Any, row_id: str) -> str:
    try:
        return text_from_content(content)
    except RowRejectedError as error:
        raise UserError(
            f"mixture.exclude: every prompt must be text, got {error} for id {row_id}"
        ) from error


def build_length_check(tokenizer: Any, max_tokens: int | None) -> Callable[[PreparedRow], None]:
    """Build a check of a row's first prompt.

    The check raises RowRejectedError for a prompt that cannot be rendered or is longer than
    `max_tokens`.
    """

    def check(row: PreparedRow) -> None:
        if row.text is not None:
            ids = tokenizer(row.text, verbose=False)["input_ids"]
        else:
            _require_chat_template(tokenizer)
            chat = ChatTemplate(tokenizer=tokenizer, arguments={**row.template, "tools": row.tools})
            prompt = chat.render(extract_first_prompt(row), add_generation_prompt=True)
            ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if max_tokens is not None and len(ids) > max_tokens:
            raise RowRejectedError(f"a prompt of more than {max_tokens:,} tokens")

    return check


def extract_first_prompt(row: PreparedRow) -> list[dict[str, Any]]:
    """Return the messages before the first answer."""
    messages = row.messages or []
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: min(answers, default=len(messages))]


def _require_chat_template(tokenizer: Any) -> None:
    if tokenizer.chat_template is None:
        raise UserError(
            "target.name: must have a chat template for conversations, got none; "
            "map a column of plain text by +mixture.sources.NAME.columns.text=COLUMN"
        )
