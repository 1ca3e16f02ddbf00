"""Held-out prompts that evaluate a draft: the demo's, a prompt file, or a dataset.

A run writes its own prompt file (held_out_files.py), whose rows name the data that they were held out from.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.chat.answer_parsing import build_exact_message, decode_answer
from data.chat.template import ChatTemplate, check_template_arguments
from data.config import DEMO
from data.sources.prompt_formats import PromptRow, describe_prompt_formats, open_prompt_rows, prompt_from_row
from data.sources.row_formats import parse_prompt_messages
from data.sources.rows import RowRejectedError, require_embeddings, require_row, require_unicode
from data.sources.template_inputs import add_system_prompt
from data.sources.text_hashes import hash_first_question
from models.io.console import log_once
from models.io.errors import UserError, require

log = logging.getLogger(__name__)
PROMPTS_KEY = "evaluation.prompts"  # config key of the prompts in error messages
# The seed of the demo's calibration prompts. It differs from the default of data.seed (0), which
# selects the prompts that drafts are trained on.
CALIBRATION_SEED, NUM_CALIBRATION_PROMPTS = 24, 32
TURN_SEPARATOR = "\n\n"  # between turns without a chat template


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One prompt as token ids, with the conversation that it belongs to.

    The turns of a conversation share their `question`; confidence intervals are over questions. `messages` is the
    conversation so far if a chat template renders it, and `remaining_turns` holds the user's next turns.
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
    first_question: int = 0  # its hash; 0 for a text to continue

    def __post_init__(self) -> None:
        if not self.question:
            object.__setattr__(self, "question", self.id)

    @property
    def row_id(self) -> int:
        """Return the key of the sampling noise (31 bits), which depends only on the id."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


def load_eval_prompts(
    tokenizer,
    path: str | None,
    *,
    limit: int | None,
    key: str = PROMPTS_KEY,
    vocab_size: int | None = None,
    template: dict[str, Any] | None = None,
) -> list[EvalPrompt]:
    """Return the first turns, category by category in file order, at most `limit` of each.

    `path` is as in `read_prompt_rows`; `template` has arguments of the chat template; those of a row come first.
    Raises UserError for a duplicate id or a prompt that the target cannot read.
    """
    rows = read_prompt_rows(path, key=key)
    is_rendered = tokenizer.chat_template is not None and any("messages" in row or "turns" in row for row in rows)
    require(
        not template or is_rendered,
        f"{key.removesuffix('prompts')}template: needs prompts that a chat template renders, got {template} for those "
        f"of {path or DEMO}; leave it out",
    )
    check_template_arguments(tokenizer, template or {}, f"{key.removesuffix('prompts')}template")
    rows = [{**row, "template": {**(template or {}), **row.get("template", {})}} for row in rows]
    turn_ids = [name_turn(row["id"], turn) for row in rows for turn in range(len(row.get("turns", [""])))]
    for row_id, count in Counter(turn_ids).items():
        require(
            count == 1,
            f"{key}: every id must be unique, got {row_id} more than once (a row without an id has its number, and a "
            "second turn ID#2)",
        )
    categories = dict.fromkeys(row["category"] for row in rows)
    return [
        _build_first_turn(tokenizer, row, key, vocab_size)
        for category in categories
        for row in [row for row in rows if row["category"] == category][:limit]
    ]


def load_calibration_prompts(
    tokenizer: Any,
    path: str,
    count: int | None = None,
    vocab_size: int | None = None,
    template: dict[str, Any] | None = None,
) -> list[EvalPrompt]:
    """Load `count` prompts of a file, by default all, or of the demo's training prompts for `demo`, by default 32."""
    if path != DEMO:
        prompts = load_eval_prompts(
            tokenizer, path, limit=None, key="prompts", vocab_size=vocab_size, template=template
        )
        return prompts if count is None else spread_prompts(prompts, count)
    from data.demo.prompts import training_prompts

    return [
        EvalPrompt(id=p.id, category=p.category, ids=tokenizer(p.text)["input_ids"])
        for p in training_prompts(count or NUM_CALIBRATION_PROMPTS, seed=CALIBRATION_SEED)
    ]


def spread_prompts(prompts: list[EvalPrompt], count: int) -> list[EvalPrompt]:
    """Return at most `count` of the prompts, of all categories if it suffices."""
    import numpy as np  # deferred: slow to import

    from data.eval_prompts.hold_out import spread_over_categories

    _, category = np.unique([prompt.category for prompt in prompts], return_inverse=True)
    return [prompts[index] for index in spread_over_categories(category, min(count, len(prompts)))]


def build_prompt(tokenizer, text: str, template_kwargs: dict[str, Any], vocab_size: int) -> EvalPrompt:
    """Return a user's message as a prompt, through the chat template if the target has one."""
    row = {"id": "prompt", "category": "prompt", "turns": [text], "template": template_kwargs}
    check_template_arguments(tokenizer, template_kwargs, "template")
    with _report_rejection("prompt", "the prompt given"):
        _clean_row(row)
    return _build_first_turn(tokenizer, row, "prompt", vocab_size)


def build_next_turns(
    tokenizer, prompts: list[EvalPrompt], answers: list[list[int]], eos_ids: Collection[int]
) -> list[EvalPrompt]:
    """Return the next turn of each conversation that has one, after the target's `answers`, which `eos_ids` end."""
    return [
        _build_next_turn(tokenizer, prompt, answer[:-1] if answer[-1:] and answer[-1] in eos_ids else answer)
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
    content = [[p.id, p.ids] + ([p.remaining_turns] if p.remaining_turns else []) for p in prompts if p.turn == 0]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_prompt_rows(source: str | Path | None, *, key: str = PROMPTS_KEY) -> list[PromptRow]:
    """Return the prompts of a file, a directory or a dataset as `prompt_from_row` builds them.

    None and `demo` stand for the demo's prompts. Raises UserError for a line that is not a prompt.
    """
    if source in (None, DEMO):
        from data.demo.prompts import held_out_prompts

        return [{"id": p.id, "category": p.category, "text": p.text} for p in held_out_prompts()]
    rows, num_answered = [], 0
    for number, (location, raw, reason, detail) in enumerate(open_prompt_rows(str(source), key), 1):
        if raw is None:
            raise UserError(f"{key}: every line must be a JSON object, got {location}: {detail or reason}")
        try:
            with _report_rejection(key, location):
                row = prompt_from_row(raw, number)
        except ValueError as error:
            raise UserError(f"{key}: {error} at {location}") from error
        if row is None:
            raise UserError(
                f"{key}: every line must have the columns of a known format, got {', '.join(raw) or 'no columns'} at "
                f"{location}; known formats are {describe_prompt_formats()}"
            )
        num_messages = len(row.get("messages", []))
        with _report_rejection(key, location):
            _clean_row(row)
        num_answered += len(row.get("messages", [])) < num_messages
        if "held_out_of" in raw:  # written by a run, with the hash that its ids do not show
            row["held_out_of"] = str(raw["held_out_of"])
            row["first_question"] = int(str(raw.get("first_question_hash", "0")), 16)
        rows.append(row)
    require(bool(rows), f"{key}: must hold at least one prompt, got {source}")
    if num_answered:
        log_once(log, f"{source}: {num_answered} prompts end in an answer, which is left out")
    return rows


@contextmanager
def _report_rejection(key: str, place: str) -> Iterator[None]:
    """Turn the rejection of a prompt into a UserError that says where it stands."""
    try:
        yield
    except RowRejectedError as error:
        detail = f" ({error.detail})" if error.detail else ""
        raise UserError(
            f"{key}: every prompt must be one that the target can answer, got {error}{detail} at "
            f"{place}; change or remove it"
        ) from error


def _clean_row(row: PromptRow) -> None:
    """Bring the messages of a prompt into the form of training; raise RowRejectedError."""
    require_unicode(row)
    if "messages" in row:
        row["messages"] = add_system_prompt(parse_prompt_messages(row["messages"]), row.get("system", ""))
    require_row(row.get("turns") != [], "no turn")
    require_row(all(text.strip() for text in row.get("turns", [])), "an empty turn")


def _build_first_turn(tokenizer, row: PromptRow, key: str, vocab_size: int | None) -> EvalPrompt:
    messages, remaining_turns, text = row.get("messages", []), [], row.get("text", "")
    if "turns" in row:
        text, *remaining_turns = row["turns"]
        if tokenizer.chat_template is not None:
            messages = add_system_prompt([{"role": "user", "content": text}], row.get("system", ""))
    needing = [name for name in ("messages", "system", "tools") if row.get(name)]
    require(
        not needing or tokenizer.chat_template is not None,
        f"{key}: needs a chat template for {' and '.join(needing)}, got id {row['id']} and a target without one; give "
        "the text alone",
    )
    template_kwargs = row["template"] | ({"tools": row["tools"]} if "tools" in row else {})
    if "ids" in row:
        ids, largest = row["ids"], max(row["ids"], default=0)
        require(
            largest < len(tokenizer),
            f"{key}: token ids must be of the target's own tokenizer, got {largest} of {len(tokenizer)} for id "
            f"{row['id']}; evaluate with the target of the run that wrote them",
        )
    elif messages:
        ids = _render_ids(tokenizer, messages, template_kwargs, key, row["id"])
    else:
        ids = tokenizer(text)["input_ids"]
    require(bool(ids), f"{key}: every prompt needs a token, got none for id {row['id']}")
    with _report_rejection(key, f"id {row['id']}"):
        require_embeddings(ids, vocab_size)
    return EvalPrompt(
        id=row["id"],
        category=row["category"],
        ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        messages=messages,
        remaining_turns=remaining_turns,
        template_kwargs=template_kwargs,
        chat_template=bool(messages) or row.get("chat_template", False),
        held_out_of=row.get("held_out_of", ""),
        first_question=row.get("first_question") or hash_first_question(messages),
    )


def _build_next_turn(tokenizer, previous: EvalPrompt, answer: list[int]) -> EvalPrompt:
    text, *remaining_turns = previous.remaining_turns
    messages = []
    if previous.messages:
        chat = ChatTemplate(tokenizer=tokenizer, arguments=previous.template_kwargs)
        answered = build_exact_message(chat, previous.messages, decode_answer(tokenizer, answer))
        messages = [*previous.messages, answered, {"role": "user", "content": text}]
        ids = _render_ids(tokenizer, messages, previous.template_kwargs, PROMPTS_KEY, previous.question)
    else:
        turn_ids = tokenizer(TURN_SEPARATOR + text, add_special_tokens=False)["input_ids"]
        ids = [*previous.ids, *answer, *turn_ids]
    return replace(
        previous,
        id=name_turn(previous.question, previous.turn + 1),
        ids=ids,
        turn=previous.turn + 1,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        messages=messages,
        remaining_turns=remaining_turns,
    )


def name_turn(question: str, turn: int) -> str:
    """Return the id of a turn, which counts turns from 1, where `turn` counts them from 0."""
    return f"{question}#{turn + 1}" if turn else question


def _render_ids(
    tokenizer, messages: list[dict[str, Any]], template_kwargs: dict[str, Any], key: str, row_id: str
) -> list[int]:
    with _report_rejection(key, f"id {row_id}"):
        chat = ChatTemplate(tokenizer=tokenizer, arguments=template_kwargs)
        return chat.render_prompt_ids(messages)
