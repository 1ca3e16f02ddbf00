"""A row of the data as a row that may be taken, or the one reason why it cannot be used.

    raw row -> our column names -> shape -> checks -> columns, sign, held out or not

The sign is a hash of all that the row asks: rows that ask the same are duplicates. Whether a row is
held out is told by a hash of its first prompt alone, so that it never moves when data is added.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data.eval_prompts.contamination import hashed, normalised, signs
from data.mixture.config import CONTENT, SourceConf
from data.sources.prepared_rows import ASKED, Row, record, row_of
from data.sources.row_formats import ANSWERS, Conversation, MisfitError, Text, Tokenised, shape

IDS = ("id", "prompt_id", "conversation_id", "question_id", "task_id", "uuid")
LICENCES = ("licence", "license")
COLUMNS = ASKED.append(pa.field("sign", pa.uint64())).append(pa.field("held_out", pa.bool_()))


@dataclass(kw_only=True)
class Rules:
    """What a row must be to be taken."""

    answered: bool  # anew: what the data answers is neither measured nor learned
    excluded: set[int]  # signs of prompts that are held out elsewhere
    held_out: float  # share
    min_chars: int
    max_chars: int | None
    fits: Callable[[Row], None] | None = None  # raises MisfitError for what the target cannot read


def candidate(raw: dict[str, Any], name: str, source: SourceConf, rules: Rules) -> dict[str, Any]:
    """The row as columns. Raises MisfitError with the reason why it cannot be used."""
    raw = mapped(raw, source.columns)
    found = shape(raw)
    if isinstance(found, Tokenised):
        raise MisfitError("token ids without their text")
    turns = _turns(found, rules)
    _check_length(turns, rules)
    if rules.excluded and not rules.excluded.isdisjoint(
        _signs(turns, plain=isinstance(found, Text))
    ):
        raise MisfitError("a prompt that is held out elsewhere")
    row = _row(raw, found, name, source)
    asked = "\0".join(normalised(text) for role, text in turns if role != "assistant")
    sign = hashed("asked", asked + (json.dumps(row.tools, default=str) if row.tools else ""))
    row.id = f"{row.id}-{sign:016x}" if row.id else f"{sign:016x}"
    if row.messages:
        picked = {key: _pick(value, sign) for key, value in source.template.items()}
        row.template = {**picked, **row.template}
    try:
        columns = record(row)
    except ValueError as error:
        raise MisfitError("a number that JSON does not have", str(error)) from error
    for value in columns.values():
        if isinstance(value, str):
            value.encode()
    if rules.fits:
        rules.fits(row_of(columns))  # as it will be read
    first = next(text for role, text in turns if role == "user")
    held_out = hashed("held out", normalised(first)) < rules.held_out * 2**64
    return {name: columns[name] for name in ASKED.names} | {"sign": sign, "held_out": held_out}


def mapped(raw: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """The row under our names. Where its content is mapped, it is looked for nowhere else."""
    if not columns:
        return raw
    content = set(columns).intersection(CONTENT)
    kept = {key: value for key, value in raw.items() if not content or key not in CONTENT}
    for ours, theirs in columns.items():
        if ours in content.difference(ANSWERS, ("input",)) and raw.get(theirs) is None:
            raise MisfitError(f"no column {theirs}", f"among {', '.join(raw)}")
        kept[ours] = raw.get(theirs)
    return kept


def _turns(found: Conversation | Text, rules: Rules) -> list[tuple[str, str]]:
    """Role and text of what is read: answers too, unless they are drawn anew."""
    if isinstance(found, Text):
        messages = [{"role": "user", "content": found.text}]
    else:
        # an empty system prompt says what none does
        found.messages = [m for m in found.messages if m["role"] != "system" or m["content"]]
        again = ("assistant",) if rules.answered else ()
        messages = [message for message in found.messages if message["role"] not in again]
    for message in messages:
        spoken = message["role"] in ("user", "assistant") and "tool_calls" not in message
        if spoken and not message["content"].strip():
            raise MisfitError("an empty turn")
    return [(message["role"], message["content"]) for message in messages]


def _check_length(turns: list[tuple[str, str]], rules: Rules) -> None:
    chars = sum(len(text) for _, text in turns)
    if chars < rules.min_chars:
        raise MisfitError(f"shorter than {rules.min_chars:,} characters")
    if rules.max_chars is not None and chars > rules.max_chars:
        raise MisfitError(f"longer than {rules.max_chars:,} characters")


def _signs(turns: list[tuple[str, str]], *, plain: bool) -> Iterator[int]:
    """Of every question and of how its answer begins; a plain text is both."""
    for (role, text), (after, answer) in zip(turns, [*turns[1:], ("", "")], strict=True):
        if role == "user":
            begins = text if plain else answer if after == "assistant" else ""
            yield from signs(text, begins)


def _row(raw: dict[str, Any], found: Conversation | Text, name: str, source: SourceConf) -> Row:
    own_id = next((raw[key] for key in IDS if isinstance(raw.get(key), str | int)), "")
    own_licence = next((raw[key] for key in LICENCES if isinstance(raw.get(key), str)), "")
    row = Row(
        id=str(own_id), source=name, licence=own_licence or source.licence,
        category=found.category or source.category, language=found.language or source.language,
    )  # fmt: skip
    if isinstance(found, Text):
        row.text = found.text
    else:
        row.messages, row.tools = found.messages, found.tools
        row.template = found.template
    return row


def _pick(value: Any, sign: int) -> Any:
    """One of a list of values, by the row's own hash."""
    return value[(sign >> 32) % len(value)] if isinstance(value, list) else value
