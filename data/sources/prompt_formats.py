"""Read prompt files and convert their rows; the columns of a row identify its format.

A row becomes {"id", "category"} and one of `text` (continued without a template), `messages`, `turns` (the user's
turns, rendered by the chat template if the target has one), or `ids` (a prompt held out by a training run, as token ids
of the run's target). What the template renders has the row's `system`, `tools` and `template` beside it.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

from data.sources.files import JSON_SUFFIXES, PARQUET_SUFFIXES, RawRow, read_dataset_rows, read_file_rows
from data.sources.open_rows import SAVED_DATASET_FILES, list_data_files, load_dataset_split
from data.sources.template_inputs import parse_if_json, read_known_inputs, read_template_inputs
from models.io.errors import require

PromptRow = dict[str, Any]
MESSAGE_TEXT = re.compile(r'\s*\{\s*"')  # the start of an object, as JSON
NO_CATEGORY = "all"  # the category of prompts without one


class PromptFormat(NamedTuple):
    """The columns that rows of a format have; the last one holds the prompt."""

    columns: tuple[str, ...]
    id_column: str = "id"
    category: str = NO_CATEGORY  # of rows without one


# The first format whose columns a row has wins, so formats with more columns stand first.
PROMPT_FORMATS = {
    "messages": PromptFormat(("messages",)),
    "Spec-Bench, MT-Bench": PromptFormat(("question_id", "turns"), id_column="question_id"),
    "HumanEval": PromptFormat(("task_id", "prompt"), id_column="task_id", category="humaneval"),
    "GSM8K": PromptFormat(("answer", "question"), category="gsm8k"),
    "question": PromptFormat(("question",)),
    "problem": PromptFormat(("problem",)),
    "Alpaca": PromptFormat(("instruction",), category="alpaca"),
    "text": PromptFormat(("text",)),
    "prompt": PromptFormat(("prompt",)),
    # This is the last format because other datasets use `ids` for the names of their rows.
    "token ids": PromptFormat(("ids",)),
}


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )


def parse_message_texts(value: Any) -> Any:
    """Return a list of messages that are stored as JSON, one text each, parsed; any other value stays as it is."""
    match value:
        case [str(first), *_] if MESSAGE_TEXT.match(first) and is_message(parse_if_json(first)):
            return [parse_if_json(text) for text in value]
    return value


def is_message(value: Any) -> bool:
    """Return whether a value of a list is a message, by its keys."""
    return isinstance(value, dict) and not value.keys().isdisjoint(("role", "from"))


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


MESSAGES_RULE = "a list of messages, each with `role` and `content`"
# The check of a column's value, and its rule in words; other columns hold a string.
COLUMN_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "turns": (_is_list_of(str), "a list of strings"),
    "messages": (_is_message_list, MESSAGES_RULE),
    "ids": (lambda value: _is_list_of(int)(value) and min(value, default=0) >= 0, "a list of token ids"),
    "prompt": (lambda value: isinstance(value, str) or _is_message_list(value), f"a string or {MESSAGES_RULE}"),
}
TEXT_CHECK = (lambda value: isinstance(value, str), "a string")


def prompt_from_row(row: PromptRow, number: int) -> PromptRow | None:
    """Return the row as a prompt, or None if its format is unknown.

    `number` becomes the id of a row without one. Raises ValueError for a column with a value of the wrong type, and
    RowRejectedError for one that the chat template could not take.

    >>> prompt_from_row({"question_id": 81, "category": "writing", "turns": ["Go.", "Again."]}, 1)
    {'id': '81', 'category': 'writing', 'turns': ['Go.', 'Again.']}
    >>> prompt_from_row({"instruction": "Add.", "input": "1 2", "output": "3"}, 7)
    {'id': '7', 'category': 'alpaca', 'turns': ['Add.\\n\\n1 2']}
    """
    row = row | {name: parse_message_texts(row[name]) for name in ("messages", "prompt") if name in row}
    present = [form for form in PROMPT_FORMATS.values() if all(row.get(column) is not None for column in form.columns)]
    if not present:
        return None
    # Tables fill the absent lists of a row with [].
    columns, id_column, category = next((form for form in present if row[form.columns[-1]] != []), present[0])
    row_id = row.get(id_column)
    return {
        "id": str(number if row_id is None else row_id),
        "category": str(row.get("category") or category),
        **_build_content(row, columns),
    }


def _build_content(row: PromptRow, columns: tuple[str, ...]) -> PromptRow:
    """Return what is asked. Raises ValueError if a column holds a value of the wrong type."""
    column = columns[-1]
    value, context = row[column], row.get("input") if column == "instruction" else None
    for name, checked in ((column, value), ("input", context)):
        is_valid, rule = COLUMN_CHECKS.get(name, TEXT_CHECK)
        if checked is not None and not is_valid(checked):
            raise ValueError(f"`{name}` must be {rule}, got {shortened(checked)}")
    match column:
        case "ids":
            return {"ids": value, "chat_template": bool(row.get("chat_template"))}
        case "text":
            return {"text": value}
        case "messages" | "prompt" if isinstance(value, list):
            return {"messages": value, **read_template_inputs(row)}
        case "turns":
            return {"turns": value, **read_known_inputs(row)}
    inputs = read_known_inputs(row)
    question = "\n\n".join(filter(None, (value, context)))
    if column == "instruction" and (earlier := messages_from_history(row.get("history"))):
        return {"messages": [*earlier, {"role": "user", "content": question}], **inputs}
    return {"turns": [question], **inputs}


def messages_from_history(history: Any) -> list[dict[str, Any]]:
    """Return the turns before an instruction, which have pairs of texts as LLaMA-Factory writes them; else none."""
    match history:
        case [*pairs] if all(_is_list_of(str)(pair) and len(pair) == 2 for pair in pairs):
            return messages_from_texts([text for pair in pairs for text in pair])
    return []


def messages_from_texts(texts: list[str]) -> list[dict[str, Any]]:
    """Convert texts to messages of alternating roles, beginning with the user."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


def describe_prompt_formats() -> str:
    """Return the known formats with their columns as one line for an error message."""
    return "; ".join(f"{name} ({', '.join(prompt_format.columns)})" for name, prompt_format in PROMPT_FORMATS.items())


def open_prompt_rows(source: str, key: str) -> Iterator[RawRow]:
    """Return an iterator over the rows of a prompt file, a directory or a dataset, which the setting `key` names."""
    path = Path(source)
    is_saved = any((path / name).exists() for name in SAVED_DATASET_FILES)
    if path.exists() and not is_saved:
        files = list_data_files(path, "test")
        require(bool(files), f"{key}: must hold JSONL, JSON or Parquet files, got none in {path}")
        return (raw for file in files for raw in read_file_rows(file, key))
    name, subset, split = (source, "", "") if is_saved else (source + "::").split(":")[:3]
    is_path = name.startswith(("/", ".", "~")) or name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES)
    require(
        is_saved or (name.count("/") == 1 and not is_path),
        f"{key}: must be a readable JSONL file, got {source}; `demo` stands for the demo's prompts",
    )
    dataset = load_dataset_split(
        name, key=key, subset=subset or None, split=split or None, split_key=f"{key}: the split"
    )
    return read_dataset_rows(dataset, source)
