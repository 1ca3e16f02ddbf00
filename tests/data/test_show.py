"""data.show prints and writes every token once, marks answers and escapes control characters."""

import json
import re
from collections import Counter
from html import unescape

import pytest

from conf.entry import compose
from data.chat.mask_check import MaskStats
from data.config import DataConf, DataSource, ShowConf, TurnSelection
from data.show import main
from data.sources.rows import TokenizedDocument, document_from_pair
from data.viewer.console import render_page
from data.viewer.documents import (
    DocumentView,
    escape_unprintable,
    render_color,
    render_plain,
    shorten_spans,
    split_into_spans,
)
from models.io.errors import UserError
from models.targets.config import TargetConf
from tests.support.data.families import AGAIN, FAMILIES, QUESTION, SINGLE, TOOL, TOOLS

EVIL = "<script>alert(1)</script>\x1b[2J\u202e</pre> [bold]"


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILIES["qwen3"].tokenizer("qwen3")


@pytest.fixture
def rows(tmp_path, tokenizer, monkeypatch):
    """Return the working folder, with a tokenizer and rows of two categories."""
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target/config.json").write_text('{"model_type": "qwen3", "vocab_size": 400}')
    conversations = [
        {"messages": SINGLE, "category": "chat", "language": "en"},
        {"messages": TOOL, "tools": TOOLS, "category": "tools"},
        {"messages": [QUESTION, {"role": "assistant", "content": EVIL}], "category": EVIL},
        {"messages": [QUESTION]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build_show_conf(**changes) -> ShowConf:
    data = DataConf(source=DataSource.jsonl, path="rows.jsonl", turns=TurnSelection.last, row_length=512)
    return ShowConf(data=data, target=TargetConf(name="target"), run_name="show", **changes)


def test_the_command_prints_and_writes_the_answers_that_are_learned(rows, capsys):
    main.__wrapped__(build_show_conf())
    output = capsys.readouterr().out
    assert "--- document 0, chat, en, " in output
    assert "\u00abIt is 7 degrees.\u21b5\n\u21b5\nThat is cold.<|im_end|>\u00bb" in output
    assert "1 left out: no assistant turn" in output
    assert "\x1b" not in output
    page = (rows / "outputs/show/show/sample.html").read_text()
    assert "://" not in page
    assert not re.findall("<(script|link|img|iframe|think)", page)
    tokens = re.findall('<b class="([^"]*)"[^>]*>(.*?)</b>', page, re.DOTALL)
    assert "&lt;think&gt;" in [text for kinds, text in tokens if "a" not in kinds.split()]
    answers = "".join(text for kinds, text in tokens if "a" in kinds.split())
    answers = unescape(re.sub("<[^>]*>", "", answers))  # line breaks are marked by tags
    assert escape_unprintable(EVIL) in answers
    assert "It is 7 degrees.\u21b5\n\u21b5\nThat is cold.<|im_end|>" in answers
    assert "Oslo" not in answers
    assert {"chat", "tools"} <= set(output.split())


def test_a_broken_mask_is_shown_before_it_is_refused(rows, capsys):
    flags = {"ids": [7, 8], "answer": [True, True], "category": "flags"}
    with (rows / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps(flags))
    with pytest.raises(UserError, match="of category 'flags' must hold prompts too"):
        main.__wrapped__(build_show_conf())
    assert "document 3, flags, 2 tokens, 2 supervised (100.0%), 1 answer" in capsys.readouterr().out
    assert (rows / "outputs/show/show/sample.html").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=jsonl", "data.path=none.jsonl"], "data.path: must be a JSONL file, got none.jsonl"),
        (["data.demo.source=target"], "data.demo.source: data.show generates nothing, got target;"),
        (["data=captured", "data.path=x"], "data.source: data.show reads rows, got captured;"),
        (["documents=0"], "documents: must be at least 1, got 0"),
        (["target.name=none"], "target.name: must be"),
        (["output_dir=rows.jsonl"], "output_dir: must be a writable folder, got rows.jsonl/show"),
    ],
)
def test_mistakes_are_refused_in_one_line(rows, read_refusal, overrides, message):
    assert read_refusal(main, *overrides).startswith(f"error: {message}")


def test_without_arguments_the_demo_is_shown_without_generation():
    bare = compose("show", ShowConf, [])
    assert (bare.data.source, bare.data.demo.source.value) == (DataSource.demo, "corpus")
    assert bare.target.name == "demo"


def test_every_token_is_shown_once_and_no_character_is_split(tokenizer):
    text = AGAIN["content"] + "\n" + EVIL
    ids = tokenizer(text)["input_ids"]
    pieces = list(split_into_spans(tokenizer, document_from_pair(ids[:5], ids[5:])))
    assert [token for piece in pieces for token in piece.ids] == ids
    assert "".join(piece.text for piece in pieces) == escape_unprintable(text)
    assert max(len(piece.ids) for piece in pieces) == 4  # the face
    alternating = TokenizedDocument(ids=ids, answer=[index % 2 == 0 for index in range(len(ids))])
    parts = list(split_into_spans(tokenizer, alternating))
    assert [piece.answer for piece in parts for _ in piece.ids] == alternating.answer


def test_long_runs_lose_their_middle_and_keep_their_edges(tokenizer):
    ids = tokenizer("user " * 200 + "system " * 200)["input_ids"]
    half = len(ids) // 2
    pieces = list(split_into_spans(tokenizer, document_from_pair(ids[:half], ids[half:])))
    shortened = shorten_spans(pieces, 100)
    assert 100 <= len(shortened) <= 104
    assert [piece.left_out for piece in shortened].count(True) == 2
    edge = next(index for index, piece in enumerate(shortened) if piece.answer)
    assert shortened[edge - 1 : edge + 1] == pieces[half - 1 : half + 1]
    assert shorten_spans(pieces[:90], 100) == pieces[:90]


def test_colours_mark_answers_and_special_tokens(tokenizer):
    start, hello, end, newline = (tokenizer(text)["input_ids"] for text in ("<|im_start|>", "a", "<|im_end|>", "\n"))
    pieces = list(split_into_spans(tokenizer, document_from_pair(start + hello, hello + end)))
    styles = [str(span.style) for span in render_color(pieces).spans]
    assert styles == ["magenta", "none", "bold green", "bold green magenta"]
    [prompt, answer] = split_into_spans(tokenizer, document_from_pair([*newline], [*newline]))
    assert str(render_color([prompt, answer]).spans[-1].style) == "dim"
    assert render_plain(pieces) == "<|im_start|>a\u00aba<|im_end|>\u00bb"


def test_a_page_escapes_every_text(tokenizer):
    ids = tokenizer(EVIL + "<think>")["input_ids"]
    view = DocumentView(EVIL, EVIL, list(split_into_spans(tokenizer, document_from_pair(ids, ids))))
    page = render_page(EVIL, EVIL, [view], {EVIL: MaskStats(documents=1)}, Counter({EVIL: 1}))
    assert "<script" not in page
    assert "<think" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
