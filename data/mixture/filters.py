"""Filters that turn a raw row into a candidate row, or reject it for exactly one reason.

    raw row -> our column names -> row format -> checks -> columns, `sign`, `held_out`

`sign` is a hash of everything that the row asks; rows with equal hashes are duplicates. `held_out`
depends on a hash of the first prompt alone, so a row never changes its split when data is added.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data.eval_prompts.contamination import hash_text, normalize_text, prompt_hashes
from data.mixture.config import CONTENT_COLUMNS, SourceConf
from data.sources.prepared_rows import INPUT_SCHEMA, PreparedRow, row_from_columns, row_to_columns
from data.sources.row_formats import (
    ANSWER_COLUMNS,
    Conversation,
    PlainText,
    RowRejectedError,
    TokenizedDocument,
    parse_row,
)

ID_COLUMNS = ("id", "prompt_id", "conversation_id", "question_id", "task_id", "uuid")
LICENSE_COLUMNS = ("licence", "license")
CANDIDATE_SCHEMA = INPUT_SCHEMA.append(pa.field("sign", pa.uint64())).append(
    pa.field("held_out", pa.bool_())
)


@dataclass(kw_only=True)
class FilterRules:
    """The limits and checks that a row must pass."""

    replace_answers: bool  # the target answers anew: the data's answers are dropped
    excluded_hashes: set[int]  # hashes of prompts that are held out elsewhere
    held_out_share: float
    min_chars: int
    max_chars: int | None
    # raises RowRejectedError for a prompt that the target cannot read
    check_length: Callable[[PreparedRow], None] | None = None


def filter_row(
    raw: dict[str, Any], name: str, source: SourceConf, rules: FilterRules
) -> dict[str, Any]:
    """Convert a raw row to candidate columns. Raises RowRejectedError with the reason."""
    raw = map_columns(raw, source.columns)
    parsed = parse_row(raw)
    if isinstance(parsed, TokenizedDocument):
        raise RowRejectedError("token ids without their text")
    turns = _extract_turns(parsed, rules)
    _check_length(turns, rules)
    if rules.excluded_hashes and not rules.excluded_hashes.isdisjoint(
        _turn_hashes(turns, is_plain_text=isinstance(parsed, PlainText))
    ):
        raise RowRejectedError("a prompt that is held out elsewhere")
    row = _build_row(raw, parsed, name, source)
    question = "\0".join(normalize_text(text) for role, text in turns if role != "assistant")
    question_hash = hash_text(
        "asked", question + (json.dumps(row.tools, default=str) if row.tools else "")
    )
    row.id = f"{row.id}-{question_hash:016x}" if row.id else f"{question_hash:016x}"
    if row.messages:
        arguments = {
            key: _pick_by_hash(value, question_hash) for key, value in source.template.items()
        }
        row.template = {**arguments, **row.template}
    try:
        columns = row_to_columns(row)
    except ValueError as error:
        raise RowRejectedError("a number that JSON does not have", str(error)) from error
    for value in columns.values():
        if isinstance(value, str):
            value.encode()  # raises UnicodeEncodeError for an unpaired surrogate
    if rules.check_length:
        rules.check_length(row_from_columns(columns))  # checks the row that a reader will get
    first_prompt = next(text for role, text in turns if role == "user")
    held_out = hash_text("held out", normalize_text(first_prompt)) < rules.held_out_share * 2**64
    return {name: columns[name] for name in INPUT_SCHEMA.names} | {
        "sign": question_hash,
        "held_out": held_out,
    }


def map_columns(raw: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Rename the row's columns to our names.

    If `columns` maps any content column, the row's other content columns are dropped.
    """
    if not columns:
        return raw
    content = set(columns).intersection(CONTENT_COLUMNS)
    mapped = {key: value for key, value in raw.items() if not content or key not in CONTENT_COLUMNS}
    for name, column in columns.items():
        if name in content.difference(ANSWER_COLUMNS, ("input",)) and raw.get(column) is None:
            raise RowRejectedError(f"no column {column}", f"the row has {', '.join(raw)}")
        mapped[name] = raw.get(column)
    return mapped


def _extract_turns(parsed: Conversation | PlainText, rules: FilterRules) -> list[tuple[str, str]]:
    """Return the role and text of each turn, without answers that will be replaced."""
    if isinstance(parsed, PlainText):
        messages = [{"role": "user", "content": parsed.text}]
    else:
        # an empty system prompt means the same as none
        parsed.messages = [m for m in parsed.messages if m["role"] != "system" or m["content"]]
        skipped_roles = ("assistant",) if rules.replace_answers else ()
        messages = [message for message in parsed.messages if message["role"] not in skipped_roles]
    for message in messages:
        needs_text = message["role"] in ("user", "assistant") and "tool_calls" not in message
        if needs_text and not message["content"].strip():
            raise RowRejectedError("an empty turn")
    return [(message["role"], message["content"]) for message in messages]


def _check_length(turns: list[tuple[str, str]], rules: FilterRules) -> None:
    chars = sum(len(text) for _, text in turns)
    if chars < rules.min_chars:
        raise RowRejectedError(f"shorter than {rules.min_chars:,} characters")
    if rules.max_chars is not None and chars > rules.max_chars:
        raise RowRejectedError(f"longer than {rules.max_chars:,} characters")


def _turn_hashes(turns: list[tuple[str, str]], *, is_plain_text: bool) -> Iterator[int]:
    """Hash every question and the beginning of its answer; a plain text serves as both."""
    for (role, text), (next_role, next_text) in zip(turns, [*turns[1:], ("", "")], strict=True):
        if role == "user":
            answer = text if is_plain_text else next_text if next_role == "assistant" else ""
            yield from prompt_hashes(text, answer)


def _build_row(
    raw: dict[str, Any], parsed: Conversation | PlainText, name: str, source: SourceConf
) -> PreparedRow:
    row_id = next((raw[key] for key in ID_COLUMNS if isinstance(raw.get(key), str | int)), "")
    row_license = next((raw[key] for key in LICENSE_COLUMNS if isinstance(raw.get(key), str)), "")
    row = PreparedRow(
        id=str(row_id), source=name, licence=row_license or source.licence,
        category=parsed.category or source.category, language=parsed.language or source.language,
    )  # fmt: skip
    if isinstance(parsed, PlainText):
        row.text = parsed.text
    else:
        row.messages, row.tools = parsed.messages, parsed.tools
        row.template = parsed.template
    return row


def _pick_by_hash(value: Any, question_hash: int) -> Any:
    """Pick one value of a list by the row's hash; return any other value as it is."""
    return value[(question_hash >> 32) % len(value)] if isinstance(value, list) else value
