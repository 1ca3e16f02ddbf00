"""Held-out prompts that a draft was trained on are found, and without the run's hashes nothing is claimed."""

import json

import numpy as np
import pytest

from data.chat.tokenization import document_from_text
from data.config import DataConf, DataSource
from data.document_cache import read_documents
from data.eval_prompts.contamination import PROMPT_HASHES_FILE, check_contamination
from data.eval_prompts.held_out_files import rows_from_documents
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.rows import document_from_pair
from data.sources.text_hashes import ANSWER_START_CHARS
from tests.data.chat.test_tokenization import PLAIN, build_chat_tokenizer
from train.rows.row_facts import write_prompt_hashes

LONG = " ".join(str(1 + i % 50) for i in range(40))
assert len(LONG) > ANSWER_START_CHARS


def build_prompts(**texts):
    return [EvalPrompt(id=name, category="c", ids=[1], text=text) for name, text in texts.items()]


@pytest.fixture
def run(target, tmp_path):
    """Return a run that learned a question with its answer, and a plain text."""
    ids = target.tokenizer([f"1 2 3 {LONG}", LONG])["input_ids"]
    texts = [document_from_pair(ids[0][:3], ids[0][3:]), document_from_text(target.tokenizer, f"7 {LONG}")]
    rows, _ = pack_documents(Documents.from_documents(texts), 128)
    write_prompt_hashes(rows, target.tokenizer, tmp_path)
    return tmp_path


def test_trained_prompts_are_found_whatever_their_spaces(run):
    prompts = build_prompts(
        question=" 1 2\n3 ", longer="1 2 3 4", answer=f"{LONG} 9 9", text=f"7 {LONG} 9", other="4 5"
    )
    report = check_contamination(prompts, run / "checkpoint")
    assert (report.checked, report.count) == (True, 3)
    assert report.ids == ["question", "answer", "text"]


SYSTEMS = ("Today is Monday.", "Today is Tuesday.", None)


def build_chat_row(system: str | None, question: str) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Far."}]
    return {"messages": messages if system is None else [build_message("system", system), *messages]}


def build_message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_a_question_that_was_trained_on_is_found_under_every_system_prompt(tmp_path):
    tokenizer = build_chat_tokenizer(PLAIN)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(build_chat_row(SYSTEMS[0], "How far is it?")))
    conf = DataConf(source=DataSource.jsonl, path=str(rows))
    packed, _ = pack_documents(read_documents(conf, tokenizer), 128)
    write_prompt_hashes(packed, tokenizer, tmp_path)
    file = tmp_path / "prompts.jsonl"
    same_question = [build_chat_row(system, "how  FAR is it?") for system in SYSTEMS]
    other = [build_chat_row(SYSTEMS[0], "How long is it?"), {"question": "How far is it?"}]
    file.write_text("\n".join(map(json.dumps, [*same_question, *other])))
    prompts = load_eval_prompts(tokenizer, str(file), limit=None)
    assert check_contamination(prompts, tmp_path / "checkpoint").ids == ["1", "2", "3", "5"]


def test_prompts_that_a_run_held_out_as_ids_are_found_by_their_question(tmp_path):
    tokenizer = build_chat_tokenizer(PLAIN)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(build_chat_row(s, "How far is it?")) for s in SYSTEMS))
    conf = DataConf(source=DataSource.jsonl, path=str(rows))
    documents = read_documents(conf, tokenizer)
    numbers = np.arange(1)
    packed, _ = pack_documents(documents, 128, document_numbers=numbers)
    write_prompt_hashes(packed, tokenizer, tmp_path)
    file = tmp_path / "held_out.jsonl"
    held = rows_from_documents(documents, [1, 2], "rows.jsonl")
    file.write_text("\n".join(map(json.dumps, held)))
    prompts = load_eval_prompts(tokenizer, str(file), limit=None)
    assert check_contamination(prompts, tmp_path / "checkpoint").count == 2


def test_without_the_runs_hashes_nothing_is_claimed(tmp_path):
    for content in (None, b"", b"cut"):
        if content is not None:
            (tmp_path / PROMPT_HASHES_FILE).write_bytes(content)
        report = check_contamination(build_prompts(a="1"), tmp_path / "checkpoint")
        assert (report.checked, report.count, report.ids) == (False, 0, [])
        assert report.reason == f"the run left no readable {PROMPT_HASHES_FILE}"
