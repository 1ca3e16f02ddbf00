"""Held-out prompts: where a draft is judged. The demo's own, a file of them, or a dataset.

A run keeps a file of its own (`data/mixture/held_out_rows.py`), whose rows say what they were held
out of.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.config import DEMO
from data.sources.prompt_files import rows_of
from data.sources.prompt_formats import known, shaped
from models.errors import UserError

KEY = "evaluation.prompts"  # what messages call the setting that named the prompts
BETWEEN_TURNS = "\n\n"  # where no chat template says what stands there


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One prompt as token ids. `row_id` keys its sampling noise: it comes from the id alone.

    The turns of a conversation share their `question`; intervals are over questions. `said` is
    the conversation so far where a chat template renders it, `later` what the user says next.
    """

    id: str
    category: str
    ids: list[int]
    question: str = ""  # empty: the id
    turn: int = 0
    text: str = ""  # the ids, read back without special tokens
    said: list[dict[str, Any]] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    rendering: dict[str, Any] = field(default_factory=dict)  # tools and arguments of the template
    chat_template: bool = False  # whether one rendered it
    held_out_of: str = ""  # the data of the run that held it back

    def __post_init__(self) -> None:
        if not self.question:
            object.__setattr__(self, "question", self.id)

    @property
    def row_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


def held_out(tokenizer, path: str | None, *, limit: int | None, key: str = KEY) -> list[EvalPrompt]:
    """First turns in file order, at most `limit` of each category; `path` as `read` takes it."""
    rows = read(path, key=key)
    kept: dict[str, list[EvalPrompt]] = {}
    seen = set()
    for row in rows:
        if row["id"] in seen:
            raise UserError(f"{key}: every id must be its own, got {row['id']} twice")
        seen.add(row["id"])
        same = kept.setdefault(row["category"], [])
        if limit is None or len(same) < limit:
            same.append(_first_turn(tokenizer, row, key))
    return [prompt for same in kept.values() for prompt in same]


def later_turns(tokenizer, prompts: list[EvalPrompt], answers: list[list[int]]) -> list[EvalPrompt]:
    """The next turn of each conversation that has one, behind the target's own `answers`."""
    return [
        _next_turn(tokenizer, prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.later
    ]


def origin(prompts: list[EvalPrompt], path: str | None) -> str:
    """Say where the prompts are from.

    >>> held_back = EvalPrompt(id="1", category="all", ids=[1], held_out_of="chat.jsonl")
    >>> origin([held_back], "outputs/train/run/held_out.jsonl")
    'held out of chat.jsonl'
    """
    if path in (None, DEMO):
        return "the demo's"
    parts = Counter(prompt.held_out_of for prompt in prompts)
    if "" in parts:
        return str(path)
    if len(parts) == 1:
        return f"held out of {next(iter(parts))}"
    return ", ".join(f"{count} held out of {name}" for name, count in parts.items())


def fingerprint(prompts: list[EvalPrompt]) -> str:
    """Of the prompts' ids and tokens, so that two reports can be told to be comparable.

    Of first turns: what comes later depends on answers.
    """
    first = [prompt for prompt in prompts if prompt.turn == 0]
    content = json.dumps([[p.id, p.ids] + ([p.later] if p.later else []) for p in first])
    return hashlib.sha256(content.encode()).hexdigest()


def read(source: str | Path | None, *, key: str = KEY) -> list[dict]:
    """The rows of a file, a directory or a dataset, as `shaped` has them.

    None and `demo` are the demo's own. Raises UserError for the line that is none.
    """
    if source in (None, DEMO):
        from data.demo.prompts import held_out_prompts

        return [{"id": p.id, "category": p.category, "text": p.text} for p in held_out_prompts()]
    rows = []
    for number, (place, raw) in enumerate(rows_of(str(source), key), 1):
        try:
            row = shaped(raw, number)
        except ValueError as error:
            raise UserError(f"{key}: {error} at {place}") from error
        if row is None:
            raise UserError(
                f"{key}: every line must have the columns of a layout, got "
                f"{', '.join(raw) or 'none'} at {place}; known are {known()}"
            )
        if "held_out_of" in raw:
            row["held_out_of"] = str(raw["held_out_of"])
        rows.append(row)
    if not rows:
        raise UserError(f"{key}: must hold at least one prompt, got {source}")
    return rows


def _first_turn(tokenizer, row: dict, key: str) -> EvalPrompt:
    said, later, text = row.get("messages", []), [], row.get("text", "")
    if "turns" in row:
        text, *later = row["turns"] or [""]
        if tokenizer.chat_template is not None:
            said = [{"role": "user", "content": text}]
    elif said and tokenizer.chat_template is None:
        raise UserError(
            f"{key}: `messages` need a chat template, got id {row['id']} and a target "
            "without one; write the prompt under `text`"
        )
    rendering = row.get("template", {}) | ({"tools": row["tools"]} if "tools" in row else {})
    if "ids" in row:
        ids = _own_ids(tokenizer, row, key)
    else:
        ids = _rendered(tokenizer, said, rendering) if said else tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"{key}: every prompt needs a token, got none for id {row['id']}")
    return EvalPrompt(
        id=row["id"], category=row["category"], ids=ids, text=_text(tokenizer, ids),
        said=said, later=later, rendering=rendering,
        chat_template=bool(said) or row.get("chat_template", False),
        held_out_of=row.get("held_out_of", ""),
    )  # fmt: skip


def _own_ids(tokenizer, row: dict, key: str) -> list[int]:
    """The ids as they stand, where this tokenizer has them all."""
    if max(row["ids"], default=0) >= len(tokenizer):
        raise UserError(
            f"{key}: token ids must be of the target's own tokenizer, got {max(row['ids'])} of "
            f"{len(tokenizer)} for id {row['id']}; judge with the target of the run that wrote them"
        )
    return row["ids"]


def _next_turn(tokenizer, before: EvalPrompt, answer: list[int]) -> EvalPrompt:
    spoken, *later = before.later
    said = []
    if before.said:
        said = [
            *before.said,
            {"role": "assistant", "content": _text(tokenizer, answer)},
            {"role": "user", "content": spoken},
        ]
        ids = _rendered(tokenizer, said, before.rendering)
    else:
        kept = answer[:-1] if answer[-1:] == [tokenizer.eos_token_id] else answer
        added = tokenizer(BETWEEN_TURNS + spoken, add_special_tokens=False)["input_ids"]
        ids = [*before.ids, *kept, *added]
    turn = before.turn + 1
    return replace(
        before, id=f"{before.question}#{turn + 1}", ids=ids, turn=turn,
        text=_text(tokenizer, ids), said=said, later=later,
    )  # fmt: skip


def _rendered(tokenizer, messages: list[dict[str, Any]], rendering: dict[str, Any]) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **rendering
    )["input_ids"]


def _text(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)
