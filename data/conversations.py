"""Documents in three shapes, from JSONL files and Hugging Face datasets.

A row that does not fit is left out and counted by its reason, never silently.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data.config import DataConf, Format, Source
from models.errors import UserError


@dataclass(kw_only=True)
class Labelled:
    """What figures are told apart by; empty where the row does not say."""

    category: str = ""
    language: str = ""


@dataclass(kw_only=True)
class Conversation(Labelled):
    """Messages as chat templates read them: a role, a content and what else the row carries."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template


@dataclass(kw_only=True)
class Text(Labelled):
    """Plain text without roles."""

    text: str


@dataclass(kw_only=True)
class Tokenised(Labelled):
    """Token ids, and which of them are answer tokens."""

    ids: list[int]
    answer: list[bool]


Row = Conversation | Text | Tokenised


class MisfitError(Exception):
    """One row cannot be used. `str(error)` is the reason under which it is counted."""


COLUMNS = {
    Format.messages: "messages",
    Format.sharegpt: "conversations",
    Format.text: "text",
    Format.tokens: "ids",
}
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}


def check(conf: DataConf) -> None:
    """Refuse data that cannot be had or read. Reads one row, needs no model."""
    if conf.source is not Source.demo:
        next(rows(conf, Counter()), None)


def rows(conf: DataConf, skipped: Counter[str]) -> Iterator[Row]:
    """Open the data now, read it row by row; `skipped` counts the rows left out, by reason."""
    if conf.source is Source.demo or conf.path is None:
        raise ValueError("the demo has prompts, not rows")
    path = Path(conf.path).expanduser()
    raw_rows = _jsonl(path) if conf.source is Source.jsonl else _dataset(conf, path)
    return _fitting(raw_rows, conf, skipped)


def _fitting(raw_rows: Iterable[dict], conf: DataConf, skipped: Counter[str]) -> Iterator[Row]:
    fits = 0
    for raw in islice(raw_rows, conf.limit):
        try:
            row = shape(raw, conf)
        except MisfitError as reason:
            skipped[str(reason)] += 1
            continue
        fits += 1
        yield row
    if not fits:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common(3))
        raise UserError(
            f"data.format: some row must have the shape {conf.format.value}, "
            f"got none in {conf.path} ({reasons or 'no rows'}); set data.format and data.column"
        )


def shape(raw: dict[str, Any], conf: DataConf) -> Row:
    """The row as a document. The value tells its shape, whatever its column is called."""
    known = COLUMNS.values() if conf.format is Format.auto else [COLUMNS[conf.format]]
    column = conf.column or next((name for name in known if name in raw), None)
    if column is None or column not in raw:
        raise MisfitError(f"no column {column or '/'.join(known)} among {', '.join(raw)}")
    match raw[column]:
        case str(text):
            found, row = Format.text, Text(text=text)
        case [{"role": _}, *_] as messages:
            found, row = Format.messages, _conversation([_message(m) for m in messages], raw)
        case [{"from": _}, *_] as turns:
            found, row = Format.sharegpt, _conversation([_turn(t) for t in turns], raw)
        case [int(), *_] as ids:
            found, row = Format.tokens, _tokenised(list(ids), raw.get("answer"))
        case _:
            raise MisfitError(f"column {column} holds neither messages, turns, text nor ids")
    if conf.format not in (Format.auto, found):
        raise MisfitError(f"column {column} has the shape {found.value}")
    labels = {
        name: raw[name] for name in ("category", "language") if isinstance(raw.get(name), str)
    }
    return replace(row, **labels)


def _message(raw: dict[str, Any]) -> dict[str, Any]:
    # tables fill absent keys with None, which templates would take for present
    message = {key: value for key, value in raw.items() if value is not None}
    content = message.setdefault("content", "")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        message["content"] = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(message["content"], str):
        raise MisfitError("a message without a role or with a content that is not text")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    """With its arguments as a value: templates write a text of JSON as one more quoted text."""
    match call:
        case {"function": {"arguments": str(arguments), **function}, **rest}:
            parsed = _parsed(arguments or "{}", "tool_calls")
            return {**rest, "function": {**function, "arguments": parsed}}
    return call


def _turn(raw: dict[str, Any]) -> dict[str, Any]:
    speaker, value = raw.get("from"), raw.get("value")
    if speaker not in ROLES or not isinstance(value, str):
        raise MisfitError(f"a turn from {speaker!r} or with a value that is not text")
    return {"role": ROLES[speaker], "content": value}


def _conversation(messages: list[dict[str, Any]], raw: dict[str, Any]) -> Conversation:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise MisfitError("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise MisfitError("an assistant turn before any user turn")
    last = len(roles) - roles[::-1].index("assistant")  # nothing is learned from what follows
    tools = _parsed(raw.get("tools"), "tools")
    template = _parsed(raw.get("template", raw.get("chat_template_kwargs")), "template")
    if not isinstance(tools, list | None) or not isinstance(template, dict | None):
        raise MisfitError("tools that are not a list or a template that is not an object")
    return Conversation(messages=messages[:last], tools=tools or None, template=template or {})


def _parsed(value: Any, name: str) -> Any:
    """Tables keep such values as JSON: columns would give every row the keys of all."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise MisfitError(f"{name} that are not JSON") from error


def _tokenised(ids: list[int], answer: Any) -> Tokenised:
    if not isinstance(answer, list) or len(answer) != len(ids):
        raise MisfitError("ids without an answer flag for each")
    return Tokenised(ids=ids, answer=[bool(flag) for flag in answer])


def _jsonl(path: Path) -> Iterator[dict]:
    if not path.is_file():
        raise UserError(f"data.path: must be a JSONL file, got {path}; check the path")
    return _json_lines(path)


def _json_lines(path: Path) -> Iterator[dict]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # broken JSON or broken UTF-8
                raise _broken(path, number, str(error)) from error
            if not isinstance(row, dict):
                raise _broken(path, number, f"a {type(row).__name__}")
            yield row


def _broken(path: Path, number: int, found: str) -> UserError:
    return UserError(
        f"data.path: every line must be a JSON object, got {found} at {path}:{number}; "
        "mend or remove the line"
    )


def _dataset(conf: DataConf, path: Path) -> Any:  # rows as dicts
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if (path / "state.json").is_file():
            return load_from_disk(str(path))
        if (path / "dataset_dict.json").is_file():
            return _split(load_from_disk(str(path)), conf)
        if path.is_file() and path.suffix in BUILDERS:
            return load_dataset(BUILDERS[path.suffix], data_files=str(path), split=conf.split)
        if path.is_dir():
            return load_dataset(str(path), name=conf.subset, split=conf.split)
        _refuse_unreachable(str(conf.path))
        return load_dataset(str(conf.path), name=conf.subset, split=conf.split)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"data.path: must be a dataset that can be loaded, got {conf.path!r} ({reason}); "
            f"check data.subset and data.split; {LOCAL_REMEDY}"
        ) from error


LOCAL_REMEDY = (
    "without a network give a local path: a directory written by save_to_disk, or a "
    ".parquet, .json, .jsonl or .arrow file"
)


def _split(splits: Any, conf: DataConf) -> Iterable[dict]:
    if conf.split not in splits:
        raise UserError(f"data.split: must be one of {', '.join(splits)}, got {conf.split!r}")
    return splits[conf.split]


def _refuse_unreachable(name: str) -> None:
    """One quick question to the hub: loading would retry for half a minute before it gives up."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in BUILDERS:
        raise UserError(f"data.path: must exist, got {name!r}; check the path, or give a hub name")
    if constants.HF_HUB_OFFLINE:
        return  # loading looks in the cache and fails at once
    try:
        HfApi().dataset_info(name, timeout=10)
    except HTTPError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"data.path: must be a reachable hub name, got {name!r} ({reason}); "
            f"set HF_HUB_OFFLINE=1 to use a copy in the cache; {LOCAL_REMEDY}"
        ) from error
