"""Filters that turn a raw row into a candidate row, or reject it for exactly one reason.

    raw row -> our column names -> row format -> checks -> columns, `sign`, `held_out`

`sign` is a hash of everything that the row asks; `held_out` depends only on a hash of its first prompt.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from data.config import CONTENT_COLUMNS
from data.eval_prompts.prompts import read_prompt_rows
from data.prepare_config import MixtureConf, SourceConf
from data.sources.prepared_rows import INPUT_SCHEMA, PreparedRow, row_from_columns, row_to_columns
from data.sources.row_formats import ANSWER_COLUMNS, REASONING_KEYS, has_content, parse_row
from data.sources.rows import Conversation, PlainText, RowRejectedError, TokenizedDocument, require_row, require_unicode
from data.sources.text_hashes import hash_text, normalize_text, prompt_hashes
from models.io.errors import require

ID_COLUMNS = ("id", "prompt_id", "conversation_id", "question_id", "task_id", "uuid")
LICENSE_COLUMNS = ("license", "licence")  # many data sets spell it the British way
CANDIDATE_SCHEMA = pa.schema([*INPUT_SCHEMA, ("sign", pa.uint64()), ("held_out", pa.bool_())])


@dataclass(kw_only=True)
class FilterRules:
    """The limits and checks that a row must pass."""

    mixture: MixtureConf  # the limits in characters and the share of held-out prompts
    replace_answers: bool  # the target answers anew: the data's answers are dropped
    excluded_hashes: set[int]  # hashes of prompts that are held out elsewhere
    # raises RowRejectedError for a prompt that the target cannot read
    check_prompt: Callable[[PreparedRow], None] | None = None


def filter_row(raw: dict[str, Any], name: str, source: SourceConf, rules: FilterRules) -> dict[str, Any]:
    """Return a raw row as candidate columns. Raises RowRejectedError with the reason."""
    raw = map_columns(raw, source.columns)
    parsed = parse_row(raw)
    if isinstance(parsed, TokenizedDocument):
        raise RowRejectedError("token ids without their text")
    messages = _extract_messages(parsed, rules)
    max_chars = rules.mixture.max_chars
    if max_chars is not None and sum(map(_count_chars, messages)) > max_chars:
        raise RowRejectedError(f"longer than {max_chars:,} characters")
    turns = [(message["role"], message["content"]) for message in messages]
    hashes = _turn_hashes(turns, is_plain_text=isinstance(parsed, PlainText))
    require_row(rules.excluded_hashes.isdisjoint(hashes), "a prompt that is held out elsewhere")
    row = _build_row(raw, parsed, name, source)
    question = "\0".join(normalize_text(text) for role, text in turns if role != "assistant")
    question_hash = hash_text("asked", question + (json.dumps(row.tools, default=str) if row.tools else ""))
    row.id = f"{row.id}-{question_hash:016x}" if row.id else f"{question_hash:016x}"
    if row.messages:
        arguments = {  # each row picks one value of a list by its hash
            key: value[(question_hash >> 32) % len(value)] if isinstance(value, list) else value
            for key, value in source.template.items()
        }
        row.template = {**arguments, **row.template}
    try:
        columns = row_to_columns(row)
    except ValueError as error:
        raise RowRejectedError("a number that JSON does not have", str(error)) from error
    require_unicode([row.id, row.category, row.language, row.license])
    if rules.check_prompt:
        rules.check_prompt(row_from_columns(columns))  # checks the row that a reader will get
    first_prompt = next(text for role, text in turns if role == "user")
    prompt_hash = hash_text("held out", normalize_text(first_prompt))
    return {name: columns[name] for name in INPUT_SCHEMA.names} | {
        "sign": question_hash,
        "held_out": prompt_hash < rules.mixture.held_out * 2**64,  # hashes have 64 bits
    }


def map_columns(raw: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Return the row with our column names; a mapped question or answer drops all other columns that could be it."""
    if not columns:
        return raw
    questions = set(CONTENT_COLUMNS).difference(ANSWER_COLUMNS, ("input",))
    mapped_questions = questions.intersection(columns)
    replaced = {key for kind in (questions, ANSWER_COLUMNS) if not columns.keys().isdisjoint(kind) for key in kind}
    mapped = {key: value for key, value in raw.items() if key not in replaced}
    for name, column in columns.items():
        if name in mapped_questions and raw.get(column) is None:
            raise RowRejectedError(f"no column {column}", f"the row has {', '.join(raw)}")
        mapped[name] = raw.get(column)
    return mapped


def _extract_messages(parsed: Conversation | PlainText, rules: FilterRules) -> list[dict[str, Any]]:
    """Return the messages of a row, or its text as one, without answers that will be replaced."""
    if isinstance(parsed, PlainText):
        messages = [{"role": "user", "content": parsed.text}]
    else:
        # An empty system prompt means the same as no system prompt.
        parsed.messages = [m for m in parsed.messages if m["role"] != "system" or m["content"]]
        while parsed.messages[1:] and parsed.messages[-1]["role"] == "user" and not has_content(parsed.messages[-1]):
            parsed.messages.pop()  # asks nothing
        require_row(any(message["role"] == "user" for message in parsed.messages), "an empty turn")
        dropped_role = "assistant" if rules.replace_answers else None
        messages = [message for message in parsed.messages if message["role"] != dropped_role]
    require_row(all(map(has_content, messages)), "an empty turn")
    return messages


def _count_chars(message: dict[str, Any]) -> int:
    """Count the characters of a message, with those of its reasoning and its tool calls."""
    return sum(len(str(message.get(key, ""))) for key in ("content", "tool_calls", *REASONING_KEYS))


def _turn_hashes(turns: list[tuple[str, str]], *, is_plain_text: bool) -> Iterator[int]:
    """Yield hashes of every question and of its answer's beginning; a plain text is both."""
    for (role, text), (next_role, next_text) in pairwise([*turns, ("", "")]):
        if role == "user":
            answer = next_text if next_role == "assistant" else ""
            yield from prompt_hashes(text, text if is_plain_text else answer)


def _build_row(raw: dict[str, Any], parsed: Conversation | PlainText, name: str, source: SourceConf) -> PreparedRow:
    row_id = next((raw[key] for key in ID_COLUMNS if isinstance(raw.get(key), str | int)), "")
    row_license = next((raw[key] for key in LICENSE_COLUMNS if isinstance(raw.get(key), str)), "")
    content: dict[str, Any] = (
        {"text": parsed.text}
        if isinstance(parsed, PlainText)
        else {"messages": parsed.messages, "tools": parsed.tools, "template": parsed.template}
    )
    return PreparedRow(
        id=str(row_id),
        source=name,
        license=row_license or source.license,
        category=parsed.category or source.category,
        language=parsed.language or source.language,
        **content,
    )


def read_first_turns(file: str) -> list[str]:
    """Return the first turn of each prompt of a file; `demo` stands for the demo's prompts."""
    return [_extract_first_turn(row) for row in read_prompt_rows(file, key="mixture.exclude")]


def _extract_first_turn(row: dict[str, Any]) -> str:
    require(
        "ids" not in row,
        f"mixture.exclude: every prompt must be text, got token ids for id {row['id']}; give the file of its texts",
    )
    if "messages" in row:
        return next(message["content"] for message in row["messages"] if message["role"] == "user")
    return row["text"] if "text" in row else row["turns"][0]
