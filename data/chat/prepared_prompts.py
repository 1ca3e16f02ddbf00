"""The first prompt of a prepared row: what it asks, and whether the target can read it."""

from itertools import takewhile
from typing import Any

from data.chat.template import ChatTemplate
from data.sources.prepared_rows import PreparedRow
from data.sources.rows import RowRejectedError, require_embeddings
from models.io.errors import require


def check_prompt_ids(row: PreparedRow, *, tokenizer: Any, max_tokens: int | None, vocab_size: int) -> None:
    """Raise RowRejectedError unless the target can read the first prompt: `max_tokens` at most, all with embeddings."""
    if row.text is not None:
        ids = tokenizer(row.text, verbose=False)["input_ids"]
    else:
        require(
            tokenizer.chat_template is not None,
            "target.name: must have a chat template for conversations, got none; "
            "map a column of plain text by +mixture.sources.NAME.columns.text=COLUMN",
        )
        chat = ChatTemplate(tokenizer=tokenizer, arguments={**row.template, "tools": row.tools})
        ids = chat.render_prompt_ids(extract_first_prompt(row))
    require_embeddings(ids, vocab_size)
    if max_tokens is not None and len(ids) > max_tokens:
        raise RowRejectedError(f"a prompt of more than {max_tokens:,} tokens")


def extract_first_prompt(row: PreparedRow) -> list[dict[str, Any]]:
    """Return the messages before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", row.messages or []))


def prompt_row_from_prepared(row: PreparedRow) -> dict[str, Any]:
    """Return the first prompt of the row as a row of a prompt file."""
    prompt = {"text": row.text} if row.messages is None else {"messages": extract_first_prompt(row)}
    optional = {"category": row.category, "tools": row.tools, "template": row.template}
    return {"id": row.id, **prompt, **{name: value for name, value in optional.items() if value}}
