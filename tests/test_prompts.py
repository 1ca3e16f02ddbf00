"""Held-out prompts: read as they are, or refused with the line and the reason."""

import json

import pytest

from data.prompts import held_out
from models.errors import UserError


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "1 2"', "every line must be JSON, got {file}:2"),
        ('{"id": "x"}', "every line needs `text` or `messages`, got {file}:2"),
        ("[1, 2]", "every line needs `text` or `messages`, got {file}:2"),
    ],
)
def test_a_bad_line_of_prompts_is_named(target, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "1 2"}\n' + line + "\n")
    with pytest.raises(UserError) as refused:
        held_out(target.tokenizer, str(file), limit=None)
    assert str(refused.value).startswith(f"evaluation.prompts: {message.format(file=file)}")


def test_prompts_that_cannot_be_judged_are_refused(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    for rows, message in [
        ([], "must hold at least one prompt"),
        ([{"text": "1"}, {"text": ""}], "every prompt needs a token, got none for id 2"),
        ([{"id": "a", "text": "1"}, {"id": "a", "text": "2"}], "every id must be its own, got a"),
        ([{"messages": [{"role": "user", "content": "1"}]}], "`messages` need a chat template"),
    ]:
        write_lines(file, rows)
        with pytest.raises(UserError, match=rf"evaluation\.prompts: {message}"):
            held_out(target.tokenizer, str(file), limit=None)


def test_prompts_are_read_as_they_are(target, tmp_path):
    rows = [
        {"id": 7, "category": "a", "text": "1 2"},
        {"text": "3 4"},
        {"category": "a", "text": "5"},
    ]
    prompts = held_out(target.tokenizer, write_lines(tmp_path / "p.jsonl", rows), limit=1)
    assert [(p.id, p.category, p.ids) for p in prompts] == [
        ("7", "a", [1, 2]),
        ("2", "all", [3, 4]),
    ]
    assert prompts[0].row_id != prompts[1].row_id
