"""Held-out prompts: where a draft is judged. The demo's own, or a JSONL file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from models.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One prompt as token ids. `row_id` keys its sampling noise: it comes from the id alone."""

    id: str
    category: str
    ids: list[int]

    @property
    def row_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


def held_out(tokenizer, path: str | None, *, limit: int | None) -> list[EvalPrompt]:
    """Prompts in file order, at most `limit` of each category. `path` None is the demo's."""
    if path is None:
        from data.demo.prompts import held_out_prompts

        rows = [{"id": p.id, "category": p.category, "text": p.text} for p in held_out_prompts()]
    else:
        rows = read(Path(path))
    kept: dict[str, list[EvalPrompt]] = {}
    known = set()
    for row in rows:
        name, category = str(row["id"]), str(row["category"])
        if name in known:
            raise UserError(f"evaluation.prompts: every id must be its own, got {name} twice")
        known.add(name)
        same = kept.setdefault(category, [])
        if limit is None or len(same) < limit:
            same.append(EvalPrompt(id=name, category=category, ids=_ids(tokenizer, row)))
    return [prompt for same in kept.values() for prompt in same]


def fingerprint(prompts: list[EvalPrompt]) -> str:
    """Of the prompts' ids and tokens, so that two reports can be told to be comparable."""
    content = json.dumps([[prompt.id, prompt.ids] for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()


def _ids(tokenizer, row: dict) -> list[int]:
    if "messages" not in row:
        ids = tokenizer(row["text"])["input_ids"]
    elif tokenizer.chat_template is None:
        raise UserError(
            f"evaluation.prompts: `messages` need a chat template, got id {row['id']} and a target "
            "without one; write the prompt under `text`"
        )
    else:
        ids = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    if not ids:
        raise UserError(
            f"evaluation.prompts: every prompt needs a token, got none for id {row['id']}"
        )
    return ids


def read(path: Path) -> list[dict]:
    """The rows of a JSONL file. Raises UserError for the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"evaluation.prompts: must be a readable JSONL file, got {path}; null takes the demo's"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"evaluation.prompts: every line must be JSON, got {path}:{number}: {error}"
            ) from error
        if not isinstance(row, dict) or not ("text" in row or "messages" in row):
            raise UserError(
                f"evaluation.prompts: every line needs `text` or `messages`, got {path}:{number}"
            )
        rows.append({"id": str(number), "category": "all"} | row)
    if not rows:
        raise UserError(f"evaluation.prompts: must hold at least one prompt, got {path}")
    return rows
