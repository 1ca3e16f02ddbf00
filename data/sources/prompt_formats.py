"""Prompt files of others: whose file it is shows in its columns.

A row becomes {"id", "category"} and one of `text` (continued as it stands), `messages`, `turns`
(what a user says, turn by turn: rendered by the chat template where the target has one), or `ids`
(a prompt that a training run held back: token ids of its own target).
"""

from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns that a row of the layout has, and what a prompt of it is made of."""

    columns: tuple[str, ...]
    said: Callable[[Row], Row]
    optional: tuple[str, ...] = ()
    id: str = "id"
    category: str = "all"  # of rows that name none


def _turns(*turns: str) -> Row:
    return {"turns": list(turns)}


def _instruction(row: Row) -> Row:
    return _turns("\n\n".join(part for part in (row["instruction"], row.get("input")) if part))


def _messages(row: Row) -> Row:
    """What `prompt` is where it is a list, else nothing."""
    return {"messages": row["prompt"]} if isinstance(row["prompt"], list) else {}


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _said(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in value
    )


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _rendering(row: Row) -> Row:
    """What a chat template takes beside the messages, as data.prepare writes it."""
    kinds = {"tools": list, "template": dict}
    return {name: row[name] for name, kind in kinds.items() if isinstance(row.get(name), kind)}


TEXT = (lambda value: isinstance(value, str), "a string")
MESSAGES = (_said, "a list of messages, each with `role` and `content`")
# What prompts are made of: whether a value will do, and what does.
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": TEXT,
    "question": TEXT,
    "problem": TEXT,
    "instruction": TEXT,
    "input": TEXT,
    "turns": (_texts, "a list of strings"),
    "messages": MESSAGES,
    "ids": (_ids, "a list of token ids"),
    "prompt": (lambda value: isinstance(value, str) or _said(value), f"a string or {MESSAGES[1]}"),
}

# The first whose columns are all there: more telling ones stand before those that they contain.
LAYOUTS = {
    "messages": Layout(
        columns=("messages",), said=lambda row: {"messages": row["messages"], **_rendering(row)}
    ),
    "Spec-Bench, MT-Bench": Layout(
        columns=("question_id", "turns"), said=lambda row: {"turns": row["turns"]}, id="question_id"
    ),
    "HumanEval": Layout(
        columns=("task_id", "prompt"),
        said=lambda row: _messages(row) or _turns(row["prompt"]),
        id="task_id",
        category="humaneval",
    ),
    "GSM8K": Layout(
        columns=("question", "answer"), said=lambda row: _turns(row["question"]), category="gsm8k"
    ),
    "question": Layout(columns=("question",), said=lambda row: _turns(row["question"])),
    "problem": Layout(columns=("problem",), said=lambda row: _turns(row["problem"])),
    "Alpaca": Layout(
        columns=("instruction",), optional=("input",), said=_instruction, category="alpaca"
    ),
    "text": Layout(columns=("text",), said=lambda row: {"text": row["text"]}),
    "prompt": Layout(
        columns=("prompt",), said=lambda row: _messages(row) or {"text": row["prompt"]}
    ),
    # Last, because other data sets name their rows by `ids`.
    "token ids": Layout(
        columns=("ids",),
        said=lambda row: {"ids": row["ids"], "chat_template": bool(row.get("chat_template"))},
    ),
}


def shaped(row: Row, number: int) -> Row | None:
    """The row as a prompt, called `number` where it has no name; None of an unknown layout.

    Raises ValueError where a column of the layout holds no text.

    >>> shaped({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, 1)
    {'id': '81', 'category': 'writing', 'turns': ['Write.', 'Again.']}
    >>> shaped({"instruction": "Add.", "input": "1 2", "output": "3"}, 7)
    {'id': '7', 'category': 'alpaca', 'turns': ['Add.\\n\\n1 2']}
    """
    for layout in LAYOUTS.values():
        if all(row.get(column) is not None for column in layout.columns):
            _check(row, layout.columns + layout.optional)
            name = row.get(layout.id)
            return {
                "id": str(number if name is None else name),
                "category": str(row.get("category") or layout.category),
                **layout.said(row),
            }
    return None


def _check(row: Row, columns: tuple[str, ...]) -> None:
    for column in columns:
        fits, kind = VALUES.get(column, (None, ""))
        if fits and row.get(column) is not None and not fits(row[column]):
            raise ValueError(f"`{column}` must be {kind}, got {shortened(row[column])}")


def known() -> str:
    """The layouts in words, for those who have another."""
    return "; ".join(f"{name} ({', '.join(one.columns)})" for name, one in LAYOUTS.items())
