"""Read prompt files and convert their rows; the columns of a row identify its format.

Files are JSONL, JSON, Parquet, a directory of them, or a Hugging Face dataset.

A row becomes {"id", "category"} and one of `text` (continued without a template), `messages`,
`turns` (the user's turns, rendered by the chat template if the target has one), or `ids` (a
prompt held out by a training run, as token ids of the run's target).
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from data.sources.files import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    RawRow,
    first_line,
    read_dataset_rows,
    read_file_rows,
)
from data.sources.open_rows import SAVED_DATASET_FILES, list_data_files, query_hub
from data.sources.splits import select_split
from models.errors import UserError, require

PromptRow = dict[str, Any]
MESSAGE_TEXT = re.compile(r'\s*\{\s*"')  # the start of an object, as JSON
# The first of these splits that a dataset has is read: prompts should be held-out data.
SPLIT_PREFERENCE = ("test", "validation", "train")
NO_CATEGORY = "all"  # the category of prompts without one


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The columns that rows of a format have, and the conversion of a row to a prompt."""

    columns: tuple[str, ...]
    to_prompt: Callable[[PromptRow], PromptRow]
    optional_columns: tuple[str, ...] = ()
    id_column: str = "id"
    default_category: str = NO_CATEGORY


def _prompt_from_instruction(row: PromptRow) -> PromptRow:
    return {"turns": ["\n\n".join(filter(None, (row["instruction"], row.get("input"))))]}


def _prompt_from_messages(row: PromptRow) -> PromptRow:
    """Return the `prompt` column as messages, or an empty row if it holds no list."""
    return {"messages": row["prompt"]} if isinstance(row["prompt"], list) else {}


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in value
    )


def parse_message_texts(value: Any) -> Any:
    """Return a list of messages that are stored as JSON, one text each, with the texts parsed.

    Any other value is returned unchanged. A text that is not JSON stays beside the messages.
    """
    match value:
        case [str(first), *_] if MESSAGE_TEXT.match(first) and _is_message(_parse_text(first)):
            return [_parse_text(text) for text in value]
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and not value.keys().isdisjoint(("role", "from"))


def _parse_text(text: Any) -> Any:
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(text)
    return text


def _template_inputs(row: PromptRow) -> PromptRow:
    """Return the columns that data.prepare writes for the chat template beside the messages."""
    kinds = {"tools": list, "template": dict}
    return {name: row[name] for name, kind in kinds.items() if isinstance(row.get(name), kind)}


TEXT_CHECK = (lambda value: isinstance(value, str), "a string")
MESSAGES_CHECK = (_is_message_list, "a list of messages, each with `role` and `content`")
MESSAGE_COLUMNS = ("messages", "prompt")
# Each column that prompts are built from has a check of its value, and its rule in words.
COLUMN_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": TEXT_CHECK,
    "question": TEXT_CHECK,
    "problem": TEXT_CHECK,
    "instruction": TEXT_CHECK,
    "input": TEXT_CHECK,
    "turns": (
        lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
        "a list of strings",
    ),
    "messages": MESSAGES_CHECK,
    "ids": (
        lambda value: isinstance(value, list) and all(type(i) is int and i >= 0 for i in value),
        "a list of token ids",
    ),
    "prompt": (
        lambda value: isinstance(value, str) or _is_message_list(value),
        f"a string or {MESSAGES_CHECK[1]}",
    ),
}

# The first format whose columns a row has wins, so formats with more columns stand first.
PROMPT_FORMATS = {
    "messages": PromptFormat(
        columns=("messages",),
        to_prompt=lambda row: {"messages": row["messages"], **_template_inputs(row)},
    ),
    "Spec-Bench, MT-Bench": PromptFormat(
        columns=("question_id", "turns"),
        to_prompt=lambda row: {"turns": row["turns"]},
        id_column="question_id",
    ),
    "HumanEval": PromptFormat(
        columns=("task_id", "prompt"),
        to_prompt=lambda row: _prompt_from_messages(row) or {"turns": [row["prompt"]]},
        id_column="task_id",
        default_category="humaneval",
    ),
    "GSM8K": PromptFormat(
        columns=("question", "answer"),
        to_prompt=lambda row: {"turns": [row["question"]]},
        default_category="gsm8k",
    ),
    "question": PromptFormat(
        columns=("question",), to_prompt=lambda row: {"turns": [row["question"]]}
    ),
    "problem": PromptFormat(
        columns=("problem",), to_prompt=lambda row: {"turns": [row["problem"]]}
    ),
    "Alpaca": PromptFormat(
        columns=("instruction",),
        optional_columns=("input",),
        to_prompt=_prompt_from_instruction,
        default_category="alpaca",
    ),
    "text": PromptFormat(columns=("text",), to_prompt=lambda row: {"text": row["text"]}),
    "prompt": PromptFormat(
        columns=("prompt",),
        to_prompt=lambda row: _prompt_from_messages(row) or {"text": row["prompt"]},
    ),
    # This is the last format because other datasets use `ids` for the names of their rows.
    "token ids": PromptFormat(
        columns=("ids",),
        to_prompt=lambda row: {"ids": row["ids"], "chat_template": bool(row.get("chat_template"))},
    ),
}


def prompt_from_row(row: PromptRow, number: int) -> PromptRow | None:
    """Return the row as a prompt, or None if its format is unknown.

    `number` becomes the id of a row without one. Raises ValueError if a column of the format holds
    a value of the wrong type.

    >>> prompt_from_row({"question_id": 81, "category": "writing", "turns": ["Go.", "Again."]}, 1)
    {'id': '81', 'category': 'writing', 'turns': ['Go.', 'Again.']}
    >>> prompt_from_row({"instruction": "Add.", "input": "1 2", "output": "3"}, 7)
    {'id': '7', 'category': 'alpaca', 'turns': ['Add.\\n\\n1 2']}
    """
    row = {
        name: parse_message_texts(value) if name in MESSAGE_COLUMNS else value
        for name, value in row.items()
    }
    for prompt_format in PROMPT_FORMATS.values():
        if all(row.get(column) is not None for column in prompt_format.columns):
            for column in prompt_format.columns + prompt_format.optional_columns:
                check, rule = COLUMN_CHECKS.get(column, (None, ""))
                if check and row.get(column) is not None and not check(row[column]):
                    raise ValueError(f"`{column}` must be {rule}, got {shortened(row[column])}")
            row_id = row.get(prompt_format.id_column)
            return {
                "id": str(number if row_id is None else row_id),
                "category": str(row.get("category") or prompt_format.default_category),
                **prompt_format.to_prompt(row),
            }
    return None


def describe_prompt_formats() -> str:
    """Return the known formats with their columns as one line for an error message."""
    return "; ".join(
        f"{name} ({', '.join(prompt_format.columns)})"
        for name, prompt_format in PROMPT_FORMATS.items()
    )


def open_prompt_rows(source: str, key: str) -> Iterator[RawRow]:
    """Return an iterator over the rows of a prompt file, a directory or a dataset.

    Rows that cannot be read are included. Errors are of type UserError and begin with `key`, the
    setting that named the source.
    """
    path = Path(source)
    if path.is_dir() and any((path / name).exists() for name in SAVED_DATASET_FILES):
        return _open_dataset(str(path), key, saved=True)
    if path.exists():
        files = list_data_files(path, "test")
        require(bool(files), f"{key}: must hold JSONL, JSON or Parquet files, got none in {path}")
        return (raw for file in files for raw in read_file_rows(file, key))
    name = source.partition(":")[0]
    is_path = name.startswith(("/", ".", "~")) or name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES)
    require(
        name.count("/") == 1 and not is_path,
        f"{key}: must be a readable JSONL file, got {source}; `demo` stands for the demo's prompts",
    )
    return _open_dataset(source, key)


def _open_dataset(source: str, key: str, *, saved: bool = False) -> Iterator[RawRow]:
    from datasets import Dataset, load_dataset, load_from_disk

    name, _, suffix = source.partition(":")  # NAME[:SUBSET[:SPLIT]]
    subset, _, split = suffix.partition(":")
    try:
        if saved:
            dataset: Any = load_from_disk(source)
        else:
            query_hub(name)
            dataset = load_dataset(name, subset or None)
    except Exception as error:  # the hub and its client raise many types
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} "
            f"({first_line(error)}); without a network give a local path"
        ) from error
    if not isinstance(dataset, Dataset):
        split = split or next(name for name in (*SPLIT_PREFERENCE, *dataset) if name in dataset)
        dataset = select_split(dataset, split, f"{key}: split")
    return read_dataset_rows(dataset, source)
