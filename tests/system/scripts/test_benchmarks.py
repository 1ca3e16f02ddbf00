"""The benchmark compares equal settings, and writes its tables without a change of the page's prose."""

import copy
import os
import re
import sys

import pytest
import torch

from conf.entry import compose
from models.drafts.options import CausalLMConf, InitFrom
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.unrolled_attention import attend_unrolled
from scripts.benchmarks import attention, demo, loss, training
from scripts.benchmarks.tables import PAGE, markdown, replaced
from scripts.engines import comparison, decoding
from tests.support.models.tiny import batch_of, learn, tree
from train.config.run import TrainConf

SMALL = loss.Size(vocab=16_000, tokens=128, width=8, chunk=4)


@pytest.fixture
def copies(target):
    """Return the target for transformers, in both precisions."""
    plain = decoding.endless(copy.deepcopy(target.model))
    return {"float32": plain, "bfloat16": copy.deepcopy(plain).to(torch.bfloat16)}


def cut_prompts(texts):
    return [text[:length] for text, length in zip(texts, (4, 6, 9), strict=False)]


def test_every_decoder_gives_the_same_answer_to_every_prompt(target, learned, copies):
    _, texts = learned
    table = decoding.autoregressive(target, copies, cut_prompts(texts), new_tokens=8)
    settings = [row[:4] for row in table.rows]
    assert settings[0] == ["ours", "float32", "static", "no"]
    assert ["generate", "float32", "static", "no"] in settings
    assert ["generate", "bfloat16", "dynamic", "no"] in settings
    assert [row[-2] for row in table.rows if row[1] == "float32"] == ["3 of 3"] * 3


def test_prompt_lookup_gives_the_answers_of_the_tree(target, learned, copies):
    draft, texts = learned
    table = decoding.drafted(target, draft, tree(), copies, cut_prompts(texts), new_tokens=8)
    assert [row[2] for row in table.rows] == ["10", "3", "5", "10", "3", "5", "10"]
    assert {row[-2] for row in table.rows if row[1] == "float32"} == {"3 of 3"}


@pytest.fixture
def draft_model(target, learned, tmp_path):
    """Return a distilled draft model by its folder, a plain Hugging Face directory that engines read."""
    _, texts = learned
    draft = build_draft(CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5]), target, loss=LossConf(), seed=0)
    learn(draft, target, batch_of(texts), steps=60)
    draft.save(tmp_path / "draft", target)
    return {tmp_path / "draft": draft.eval()}


def test_without_the_engines_the_other_decoders_are_compared_and_the_remedy_is_printed(
    target, learned, draft_model, copies, tmp_path, monkeypatch
):
    monkeypatch.setenv("ENGINES", str(tmp_path / "nowhere"))
    _, texts = learned
    table = comparison.compare(target, draft_model, tree(), copies, cut_prompts(texts), new_tokens=8)
    *rows, last = table.rows
    assert [row[:3] for row in rows] == [
        ["none", "ours", "0"],
        ["none", "generate, static", "0"],
        ["causal_lm", "ours, chain", "4"],
        ["causal_lm", "ours, tree", "10"],
        ["causal_lm", "assisted, constant", "4"],
        ["causal_lm", "assisted, default", "at most 20"],
    ]
    assert {row[-2] for row in rows} == {"6 of 6"}  # three prompts, forth and back
    assert "`make test-engines` installs it" in last[1]
    assert len(last) == len(table.columns)


STAND_IN = """
from types import SimpleNamespace as Record
__version__ = "0.0"
ANSWERS, LOG = {answers}, open({log!r}, "a")
SamplingParams = Record
class LLM:
    def __init__(self, **settings):
        self.drafting = settings["speculative_config"]
    def generate(self, prompt, greedy, use_tqdm):
        ids = prompt["prompt_token_ids"]
        print(ids[0], greedy.max_tokens, file=LOG, flush=True)
        answer = ANSWERS[tuple(ids)][: greedy.max_tokens]
        return [Record(outputs=[Record(token_ids=answer)])]
"""


@pytest.fixture
def threads_of_the_machine():
    """Limit the threads, since PyTorch takes no more of OMP_NUM_THREADS than there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


def build_engines(folder, answers):
    """Build an environment whose `vllm` gives these answers and logs its requests."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".ready-vllm-0.0").touch()
    (folder / "vllm.py").write_text(STAND_IN.format(answers=answers, log=str(folder / "log")))
    return folder


def test_an_engine_is_warmed_up_and_timed_in_turns_and_its_different_answers_are_counted(
    target, learned, copies, tmp_path, monkeypatch, threads_of_the_machine
):
    _, texts = learned
    prompts = cut_prompts(texts)
    loop = decoding.decoding(target, prompts=prompts, new_tokens=8, settings=[])
    answers = {tuple(prompt): loop.run(prompt, 8) for prompt in prompts}
    answers[tuple(prompts[1])][-1] += 1
    folder = build_engines(tmp_path / "engines", answers)
    monkeypatch.setenv("ENGINES", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(decoding, "WARM_UP_TOKENS", 3)
    table = comparison.compare(target, {}, tree(), copies, prompts, new_tokens=8)
    served = table.rows[-1]
    assert served[:3] == ["none", "vLLM", "0"]
    assert served[-2] == "4 of 6"
    assert "vLLM 0.0" in table.note
    log = (folder / "log").read_text()
    requests = [[int(word) for word in line.split()] for line in log.splitlines()]
    assert requests[0][1] == 3
    shortest = min(prompts, key=len)
    turns = [[[shortest[0], 3], [prompt[0], 8]] for prompt in prompts for _ in range(2)]
    assert requests[1:] == [request for turn in turns for request in turn]


def test_an_engine_that_fails_is_quoted(target, copies, tmp_path, monkeypatch, threads_of_the_machine):
    folder = build_engines(tmp_path / "engines", {})
    monkeypatch.setenv("ENGINES", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with pytest.raises(RuntimeError, match=r"vLLM has ended: (.|\n)*KeyError"):
        comparison.compare(target, {}, tree(), copies, [[1, 2, 3]], new_tokens=2)


def test_turns_alternate_forth_and_back():
    order = []
    first, second = (
        decoding.Contender(settings=[], run=lambda _, count, name=name: order.append(name) or [0] * count)
        for name in "ab"
    )
    decoding.race([first, second], [[1], [2]], new_tokens=1, turns=2)
    assert "".join(order[2:]) == "aabbbbaabbaaaabb"  # untimed, timed
    assert len(first.seconds) == 4


def test_our_runtime_is_compared_with_the_fastest_setting_of_the_others():
    ours, slow, fast = (
        decoding.Contender(settings=[name], run=None, seconds=seconds, answers=[[1, 2]] * 2)
        for name, seconds in [("ours", [1.0, 1.0]), ("slow", [4.0, 4.0]), ("fast", [2.0, 2.0])]
    )
    table = decoding.table(ours, [slow, fast], title="", columns=["decoding"], new_tokens=2)
    assert table.note.startswith("Ours is 2.00 [2.00, 2.00] times the fastest of the others (fast)")


def test_the_chunked_loss_costs_less_memory_for_the_same_value():
    table = loss.compare(SMALL, threads=1, order=("plain", "chunked"))
    plain, chunked = table.rows
    assert (plain[0], chunked[0]) == ("plain", "chunked")
    assert float(plain[-1]) == pytest.approx(float(chunked[-1]), abs=2e-6)
    assert float(chunked[3]) < float(plain[3])


def test_training_is_measured_with_either_loss(target):
    small = ["optim.rows_per_step=2", "data.row_length=40", "draft.layers=[1,3,5]"]
    conf = compose("train", TrainConf, [*small, "draft.vocab_size=null"])
    table = training.compare(conf, target, steps=1)
    settings = [["chunked", "live"], ["plain", "live"], ["chunked", "kept"]]
    assert [row[:3] for row in table.rows] == [["no", *setting] for setting in settings]


def test_a_missing_draft_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        demo.main([])
    output = capsys.readouterr()
    assert "python -m train" in output.err
    assert output.out == ""


def test_tables_are_written_between_their_markers_and_nowhere_else():
    page = PAGE.read_text()
    table = decoding.Table(title="", note="A note.", columns=["a", "b"], rows=[["x", "1"]])
    for part in demo.PARTS:
        changed = replaced(page, part, markdown(table, setting="a machine"))
        assert "| a | b |\n| --- | ---: |\n| x | 1 |" in changed
        block = re.compile(rf"<!-- {part} -->.*<!-- /{part} -->", re.DOTALL)
        assert block.sub("", changed) == block.sub("", page)


def test_the_attention_that_keeps_all_scores_is_the_unrolled_one(monkeypatch):
    monkeypatch.setattr(attention, "HEAD_SIZE", 4)
    query, *rest = (torch.randn(1, heads, 6, 4).requires_grad_() for heads in [4, *[2] * 6])
    inputs = (query, rest[:3], rest[3:], torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    values = [form(*inputs) for form in (attention.attend_plainly, attend_unrolled)]
    plain, unrolled = [[value, *torch.autograd.grad(value.square().sum(), [query, *rest])] for value in values]
    torch.testing.assert_close(plain, unrolled)


def test_the_table_of_attention_has_the_growth_from_a_row_of_half_the_length():
    costs = {"plain": {512: (8.0, 100.0)}, "kernel": {512: (2.0, 50.0), 1024: (6.0, 105.0)}}
    as_named = {f: {n: {"seconds": s, "peak_mib": m} for n, (s, m) in by.items()} for f, by in costs.items()}
    rows = attention.build_table(as_named).rows
    assert rows[1:] == [
        ["kernel", "512", "50", "", "2.00", "", "0.25"],
        ["kernel", "1,024", "105", "2.10", "6.00", "3.00", ""],
    ]
