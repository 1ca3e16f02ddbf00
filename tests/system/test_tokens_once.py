"""Four ranks of two processes each tokenize a data set once, and a later start not at all.

Every call of the tokenizer's chat template is counted, in any process.
"""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data.config import DataConf, DataSource
from data.document_cache import read_cached_documents, read_documents
from scripts.benchmarks.tokens import write_conversations
from tests.data.test_document_cache import SIZE, assert_equal, build_tokenizer

pytestmark = pytest.mark.system
ROWS, RANKS = 2000, 4


class CountedTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that adds a byte to the file `COUNT_FILE` of the environment with each rendered text."""

    def apply_chat_template(self, *arguments, **options):
        descriptor = os.open(os.environ["COUNT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)
        return super().apply_chat_template(*arguments, **options)


def build_counted_tokenizer() -> CountedTokenizer:
    plain = build_tokenizer()
    return CountedTokenizer(
        tokenizer_object=plain.backend_tokenizer, chat_template=plain.chat_template, eos_token=plain.eos_token
    )


def open_data(conf: DataConf, output_dir: str, hashes) -> None:
    documents = read_cached_documents(conf, build_counted_tokenizer(), SIZE, output_dir)
    hashes.put(documents.content_hash())


def start_ranks(conf: DataConf, output_dir: Path) -> set[str]:
    """Start the ranks; return the hashes of their documents."""
    context = multiprocessing.get_context("spawn")
    hashes = context.Queue()
    ranks = [context.Process(target=open_data, args=(conf, str(output_dir), hashes)) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    contents = {hashes.get() for _ in ranks}
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return contents


@pytest.mark.slow
def test_four_ranks_tokenize_once_and_a_later_start_nothing(tmp_path, monkeypatch):
    write_conversations(tmp_path / "rows.jsonl", ROWS)
    conf = DataConf(source=DataSource.jsonl, path=str(tmp_path / "rows.jsonl"), processes=2)
    counts = {name: tmp_path / name for name in ("alone", "first", "second")}
    monkeypatch.setenv("COUNT_FILE", str(counts["alone"]))
    alone = read_documents(replace(conf, processes=1), build_counted_tokenizer(), SIZE)
    assert len(alone) == ROWS
    for name in ("first", "second"):
        monkeypatch.setenv("COUNT_FILE", str(counts[name]))
        assert start_ranks(conf, tmp_path) == {alone.content_hash()}
    assert counts["first"].stat().st_size == counts["alone"].stat().st_size >= ROWS
    assert not counts["second"].exists()
    assert_equal(read_cached_documents(conf, build_counted_tokenizer(), SIZE, str(tmp_path)), alone)
