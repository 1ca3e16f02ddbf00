"""Held-out prompts: where a draft is judged. The demo's own, a file of them, or a dataset."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.prompt_files import rows_of
from data.prompt_layouts import known, shaped
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

    def __post_init__(self) -> None:
        if not self.question:
            object.__setattr__(self, "question", self.id)

    @property
    def row_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


def held_out(tokenizer, path: str | None, *, limit: int | None, key: str = KEY) -> list[EvalPrompt]:
    """First turns in file order, at most `limit` of each category. `path` None is the demo's."""
    if path is None:
        from data.demo.prompts import held_out_prompts

        rows = [{"id": p.id, "category": p.category, "text": p.text} for p in held_out_prompts()]
    else:
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


def fingerprint(prompts: list[EvalPrompt]) -> str:
    """Of the prompts' ids and tokens, so that two reports can be told to be comparable.

    Of first turns: what comes later depends on answers.
    """
    first = [prompt for prompt in prompts if prompt.turn == 0]
    content = json.dumps([[p.id, p.ids] + ([p.later] if p.later else []) for p in first])
    return hashlib.sha256(content.encode()).hexdigest()


def read(source: str | Path, *, key: str = KEY) -> list[dict]:
    """The rows of a file, a directory or a dataset, as `shaped` has them.

    Raises UserError for the line that is none.
    """
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
    ids = _rendered(tokenizer, said, rendering) if said else tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"{key}: every prompt needs a token, got none for id {row['id']}")
    return EvalPrompt(
        id=row["id"], category=row["category"], ids=ids, text=_text(tokenizer, ids),
        said=said, later=later, rendering=rendering,
    )  # fmt: skip


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
