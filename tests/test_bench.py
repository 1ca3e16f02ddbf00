"""The benchmark compares like with like, and writes its page without touching the prose."""

import copy
import re

import pytest
import torch

from conf.entry import compose
from models.drafts.causal_lm import CausalLMConf, Start
from models.losses import LossConf
from scripts import bench, bench_decoding, bench_loss, bench_train
from scripts.bench_tables import PAGE, markdown, replaced
from tests.tiny import batch_of, chain, learn, tree
from train.config import TrainConf

SMALL = bench_loss.Size(vocab=16_000, tokens=128, width=8, chunk=4)


@pytest.fixture
def copies(target):
    """What transformers decodes with: the target in both precisions."""
    plain = bench_decoding.endless(copy.deepcopy(target.model))
    return {"float32": plain, "bfloat16": copy.deepcopy(plain).to(torch.bfloat16)}


def prompts_of(texts):
    return [text[:length] for text, length in zip(texts, (4, 6, 9), strict=False)]


def test_everyone_continues_every_prompt_by_the_same_answer(target, learned, copies):
    _, texts = learned
    table = bench_decoding.autoregressive(target, copies, prompts_of(texts), new_tokens=8)
    settings = [row[:4] for row in table.rows]
    assert settings[0] == ["ours", "float32", "static", "no"]
    assert ["generate", "float32", "static", "no"] in settings
    assert ["generate", "bfloat16", "dynamic", "no"] in settings
    assert [row[-2] for row in table.rows if row[1] == "float32"] == ["3 of 3"] * 3


def test_prompt_lookup_gives_the_answers_of_the_tree(target, learned, copies):
    draft, texts = learned
    table = bench_decoding.drafted(target, draft, tree(), copies, prompts_of(texts), new_tokens=8)
    assert [row[2] for row in table.rows] == ["10", "3", "5", "10", "3", "5", "10"]
    assert {row[-2] for row in table.rows if row[1] == "float32"} == {"3 of 3"}


def test_assisted_generation_gives_the_same_answers_with_the_same_draft_model(
    target, learned, copies, tmp_path
):
    """Its checkpoint is a plain Hugging Face directory, which transformers takes as it is."""
    _, texts = learned
    draft = CausalLMConf(start=Start.pruned, layers=[0, 5]).build(target, loss=LossConf(), seed=0)
    learn(draft, target, batch_of(texts), steps=60)
    draft.save(tmp_path, target)
    assistants = bench_decoding.models(tmp_path, target.device)
    table = bench_decoding.assisted(
        target, draft, [chain(4), tree()], copies, assistants, prompts_of(texts), new_tokens=8
    )
    assert [row[0] for row in table.rows] == ["ours, chain", "ours, dynamic"] + 4 * ["assisted"]
    assert {row[-2] for row in table.rows if row[1] == "float32"} == {"3 of 3"}


def test_ours_is_compared_with_the_fastest_setting():
    ours, slow, fast = (
        bench_decoding.Contender(settings=[name], run=None, seconds=seconds, answers=[[1, 2]] * 2)
        for name, seconds in [("ours", [1.0, 1.0]), ("slow", [4.0, 4.0]), ("fast", [2.0, 2.0])]
    )
    table = bench_decoding.table(ours, [slow, fast], title="", columns=["decoding"], new_tokens=2)
    assert table.note.startswith("Ours is 2.00 [2.00, 2.00] times the fastest of the others (fast)")


def test_the_chunked_loss_costs_less_memory_for_the_same_value():
    table = bench_loss.compare(SMALL, threads=1, order=("plain", "chunked"))
    plain, chunked = table.rows
    assert (plain[0], chunked[0]) == ("plain", "chunked")
    assert float(plain[-1]) == pytest.approx(float(chunked[-1]), abs=2e-6)
    assert float(chunked[3]) < float(plain[3])


def test_training_is_measured_with_either_loss(target):
    small = ["optim.batch_size=2", "data.length=40", "draft.layers=[1,3,5]"]
    conf = compose("train", TrainConf, [*small, "draft.vocab_size=null"])
    table = bench_train.compare(conf, target, steps=1)
    ways = [["chunked", "live"], ["plain", "live"], ["chunked", "kept"]]
    assert [row[:3] for row in table.rows] == [["no", *way] for way in ways]


def test_a_missing_draft_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        bench.main([])
    said = capsys.readouterr()
    assert "python -m train" in said.err
    assert said.out == ""


def test_tables_go_between_their_markers_and_nowhere_else():
    page = PAGE.read_text()
    table = bench_decoding.Table(title="", note="A note.", columns=["a", "b"], rows=[["x", "1"]])
    for part in bench.PARTS:
        changed = replaced(page, part, markdown(table, setting="a machine"))
        assert "| a | b |\n| --- | ---: |\n| x | 1 |" in changed
        block = re.compile(rf"<!-- {part} -->.*<!-- /{part} -->", re.DOTALL)
        assert block.sub("", changed) == block.sub("", page)
