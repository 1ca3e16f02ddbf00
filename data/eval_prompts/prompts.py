"""Held-out prompts that evaluate a draft: the demo's, a prompt file, or a dataset.

A run writes its own prompt file (`data/mixture/held_out_rows.py`), whose rows name the data that
they were held out from.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.config import DEMO
from data.sources.prompt_formats import describe_prompt_formats, open_prompt_rows, prompt_from_row
from models.errors import UserError, require

PROMPTS_KEY = "evaluation.prompts"  # config key of the prompts in error messages
TURN_SEPARATOR = "\n\n"  # between turns without a chat template


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One prompt as token ids, with the conversation that it belongs to.

    The turns of a conversation share their `question`; confidence intervals are over questions.
    `messages` is the conversation so far if a chat template renders it, and `remaining_turns`
    holds the user's next turns.
    """

    id: str
    category: str
    ids: list[int]
    question: str = ""  # id of the conversation; empty: the prompt's own id
    turn: int = 0
    text: str = ""  # the ids, decoded without special tokens
    messages: list[dict[str, Any]] = field(default_factory=list)
    remaining_turns: list[str] = field(default_factory=list)
    # tools and arguments of the chat template
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: bool = False  # True if a chat template rendered the ids
    held_out_of: str = ""  # the data that the prompt was held out from

    def __post_init__(self) -> None:
        if not self.question:
            object.__setattr__(self, "question", self.id)

    @property
    def row_id(self) -> int:
        """Return the key of the sampling noise (31 bits), which depends only on the id."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


def load_eval_prompts(
    tokenizer, path: str | None, *, limit: int | None, key: str = PROMPTS_KEY
) -> list[EvalPrompt]:
    """Return the first turns, category by category in file order, at most `limit` of each.

    `path` is as in `read_prompt_rows`. Raises UserError for a duplicate id.
    """
    rows = read_prompt_rows(path, key=key)
    for row_id, count in Counter(row["id"] for row in rows).items():
        require(count == 1, f"{key}: every id must be unique, got {row_id} more than once")
    categories = dict.fromkeys(row["category"] for row in rows)
    return [
        _build_first_turn(tokenizer, row, key)
        for category in categories
        for row in [row for row in rows if row["category"] == category][:limit]
    ]


def build_prompt(tokenizer, text: str, template_kwargs: dict[str, Any]) -> EvalPrompt:
    """Return a user's message as a prompt, through the chat template if the target has one."""
    row = {"id": "prompt", "category": "prompt", "turns": [text], "template": template_kwargs}
    return _build_first_turn(tokenizer, row, "prompt")


def build_next_turns(
    tokenizer, prompts: list[EvalPrompt], answers: list[list[int]]
) -> list[EvalPrompt]:
    """Return the next turn of each conversation that has one, after the target's `answers`."""
    return [
        _build_next_turn(tokenizer, prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.remaining_turns
    ]


def describe_origin(prompts: list[EvalPrompt], path: str | None) -> str:
    """Return a phrase that says where the prompts come from.

    >>> held_back = EvalPrompt(id="1", category="all", ids=[1], held_out_of="chat.jsonl")
    >>> describe_origin([held_back], "outputs/train/run/held_out.jsonl")
    'held out from chat.jsonl'
    """
    if path in (None, DEMO):
        return "the demo's"
    counts = Counter(prompt.held_out_of for prompt in prompts)
    if "" in counts:
        return str(path)
    return ", ".join(
        f"{count} held out from {name}" if len(counts) > 1 else f"held out from {name}"
        for name, count in counts.items()
    )


def fingerprint_prompts(prompts: list[EvalPrompt]) -> str:
    """Return a hash of the first turns' ids and tokens; reports with equal hashes are comparable.

    Later turns count only by their texts, because their token ids depend on answers.
    """
    content = [
        [p.id, p.ids] + ([p.remaining_turns] if p.remaining_turns else [])
        for p in prompts
        if p.turn == 0
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_prompt_rows(source: str | Path | None, *, key: str = PROMPTS_KEY) -> list[dict]:
    """Return the prompts of a file, a directory or a dataset as `prompt_from_row` builds them.

    None and `demo` stand for the demo's prompts. Raises UserError for a line that is not a prompt.
    """
    if source in (None, DEMO):
        from data.demo.prompts import held_out_prompts

        return [{"id": p.id, "category": p.category, "text": p.text} for p in held_out_prompts()]
    rows = []
    for number, (location, raw, reason, detail) in enumerate(open_prompt_rows(str(source), key), 1):
        if raw is None:
            raise UserError(
                f"{key}: every line must be a JSON object, got {location}: {detail or reason}"
            )
        try:
            row = prompt_from_row(raw, number)
        except ValueError as error:
            raise UserError(f"{key}: {error} at {location}") from error
        if row is None:
            raise UserError(
                f"{key}: every line must have the columns of a known format, got "
                f"{', '.join(raw) or 'no columns'} at {location}; known formats are "
                f"{describe_prompt_formats()}"
            )
        if "held_out_of" in raw:
            row["held_out_of"] = str(raw["held_out_of"])
        rows.append(row)
    require(bool(rows), f"{key}: must hold at least one prompt, got {source}")
    return rows


def _build_first_turn(tokenizer, row: dict, key: str) -> EvalPrompt:
    messages, remaining_turns, text = row.get("messages", []), [], row.get("text", "")
    if "turns" in row:
        text, *remaining_turns = row["turns"] or [""]
        if tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": text}]
    require(
        not messages or tokenizer.chat_template is not None,
        f"{key}: `messages` need a chat template, got id {row['id']} and a target without one; "
        "write the prompt under `text`",
    )
    template_kwargs = row.get("template", {}) | ({"tools": row["tools"]} if "tools" in row else {})
    if "ids" in row:
        ids, largest = row["ids"], max(row["ids"], default=0)
        require(
            largest < len(tokenizer),
            f"{key}: token ids must be of the target's own tokenizer, got {largest} of "
            f"{len(tokenizer)} for id {row['id']}; evaluate with the target of the run that wrote "
            "them",
        )
    elif messages:
        ids = _render_ids(tokenizer, messages, template_kwargs)
    else:
        ids = tokenizer(text)["input_ids"]
    require(bool(ids), f"{key}: every prompt needs a token, got none for id {row['id']}")
    return EvalPrompt(
        id=row["id"], category=row["category"], ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True), messages=messages,
        remaining_turns=remaining_turns, template_kwargs=template_kwargs,
        chat_template=bool(messages) or row.get("chat_template", False),
        held_out_of=row.get("held_out_of", ""),
    )  # fmt: skip


def _build_next_turn(tokenizer, previous: EvalPrompt, answer: list[int]) -> EvalPrompt:
    text, *remaining_turns = previous.remaining_turns
    messages = []
    if previous.messages:
        messages = [
            *previous.messages,
            {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)},
            {"role": "user", "content": text},
        ]
        ids = _render_ids(tokenizer, messages, previous.template_kwargs)
    else:
        answer_ids = answer[:-1] if answer[-1:] == [tokenizer.eos_token_id] else answer
        turn_ids = tokenizer(TURN_SEPARATOR + text, add_special_tokens=False)["input_ids"]
        ids = [*previous.ids, *answer_ids, *turn_ids]
    return replace(  # Ids count turns from 1, `turn` counts them from 0.
        previous, id=f"{previous.question}#{previous.turn + 2}", ids=ids, turn=previous.turn + 1,
        text=tokenizer.decode(ids, skip_special_tokens=True), messages=messages,
        remaining_turns=remaining_turns,
    )  # fmt: skip


def _render_ids(
    tokenizer, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]
) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **template_kwargs
    )["input_ids"]
