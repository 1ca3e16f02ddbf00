"""`python -m infer.generate` prints the target's own answers, and pieces of text add up to them."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conf.entry import compose
from data.chat.template import ChatTemplate
from data.chat.tokenization import documents_from_row
from data.config import DataConf, DataSource
from data.eval_prompts.prompts import EvalPrompt
from data.sources.row_formats import parse_row
from data.sources.rows import Conversation
from infer.commands import generation
from infer.commands.generation import compile_graphs, describe_answer, describe_speed
from infer.config import GenerateConf
from infer.engine.decode import Decoder
from infer.engine.requests import Generation
from infer.generate import main
from models.device.graph_budget import GraphLedger
from models.io.errors import UserError
from models.trees.sampling_config import SamplingConf
from tests.support.data.families import FAMILIES
from tests.support.models.tiny import CPU, chain, tiny_target

NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, learned):
    """Return a folder with a target and a draft that has learned texts of it."""
    folder = tmp_path_factory.mktemp("generate")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    learned[0].save(folder / "draft", target)
    return folder


def run_generate(folder, *overrides: str) -> None:
    main.__wrapped__(
        compose(
            "generate",
            GenerateConf,
            [
                f"checkpoint={folder / 'draft'}",
                f"target.path={folder / 'target'}",
                f"max_new_tokens={NEW}",
                *"tree=chain tree.depth=3 device=cpu device.compile=false".split(),
                f"output_dir={folder}",
                *overrides,
            ],
        )
    )


def join_ids(ids) -> str:
    return " ".join(map(str, ids))


def generate_with_transformers(target, ids) -> list[int]:
    out = target.model.generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=target.eos_ids, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def test_an_answer_is_printed_with_its_tokens_and_rounds(folder, target, learned, capsys):
    text = learned[1][0]
    run_generate(folder, f"prompt='{join_ids(text[:4])}'")
    output = capsys.readouterr().out
    assert not (folder / "generate").exists()
    answer = generate_with_transformers(target, text[:4])
    assert target.tokenizer.decode(answer) in output.replace("\n", " ")
    tokens, by_rounds, rounds, per_round = re.search(
        r"(\d+) tokens, [\d.]+ tokens/s: 1 from reading the prompt, (\d+) from (\d+) rounds, "
        r"([\d.]+) per round",
        output,
    ).groups()
    assert int(tokens) == len(answer) == 1 + int(by_rounds)
    assert float(per_round) == pytest.approx(int(by_rounds) / int(rounds), abs=0.005)
    assert float(per_round) > 2  # the draft knows this text


def test_the_answers_to_a_file_are_written_in_its_order(folder, target, learned, capsys):
    prompts = [text[:length] for text, length in zip(learned[1][:5], (4, 9, 5, 7, 6), strict=True)]
    rows = [{"id": f"p{i}", "text": join_ids(ids)} for i, ids in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_generate(folder, f"prompts={folder / 'prompts.jsonl'}", "batch=2")
    file = folder / "generate" / "answers.jsonl"
    assert f"answers: {file}" in capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    for line, ids in zip(lines, prompts, strict=True):
        assert line["answer"] == target.tokenizer.decode(generate_with_transformers(target, ids))
        assert 0 < line["rounds"] < line["tokens"] == NEW


def test_an_answer_may_have_a_single_token(folder, target, learned, tmp_path):
    ids = learned[1][0][:4]
    run_generate(folder, f"prompt='{join_ids(ids)}'", f"output={tmp_path}/answer.jsonl", "max_new_tokens=1")
    line = json.loads((tmp_path / "answer.jsonl").read_text())
    first = generate_with_transformers(target, ids)[:1]
    assert (line["answer"], line["tokens"], line["rounds"]) == (target.tokenizer.decode(first), 1, 0)


def test_a_tree_file_of_lookup_alone_answers_without_the_draft(folder, target, learned, tmp_path, capsys):
    tree = {"tree": {"kind": "chain", "depth": 4, "ngram_tokens": 0}, "mode": "ngram"}
    (tmp_path / "run-tuned.json").write_text(json.dumps(tree))
    ids = learned[1][0][:4]
    rounds = {}
    for name, overrides in {"draft": [], "lookup": [f"tree.file={tmp_path}/run-tuned.json"]}.items():
        run_generate(folder, f"prompt='{join_ids(ids)}'", f"output={tmp_path}/{name}.jsonl", *overrides)
        assert ("draft: n-gram lookup alone" in capsys.readouterr().out) == (name == "lookup")
        line = json.loads((tmp_path / f"{name}.jsonl").read_text())
        assert line["answer"] == target.tokenizer.decode(generate_with_transformers(target, ids))
        rounds[name] = line["rounds"]
    assert rounds["lookup"] > rounds["draft"]  # which knows this text


def test_categories_do_not_change_the_order_of_answers(folder, target, tmp_path):
    rows = [{"id": str(i), "category": "ab"[i % 2], "prompt": f"{3 + i} 4"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conf = compose("generate", GenerateConf, [f"prompts={tmp_path}/prompts.jsonl", f"target.path={folder / 'target'}"])
    assert [prompt.id for prompt in generation.load_prompts(conf.target, conf)] == ["0", "1", "2", "3"]


def test_the_answer_to_one_prompt_is_written_too_where_a_file_is_named(folder, target, learned, tmp_path, capsys):
    ids = learned[1][0][:4]
    run_generate(folder, f"prompt='{join_ids(ids)}'", f"output={tmp_path / 'answer.jsonl'}")
    assert capsys.readouterr().out.endswith(f"answers: {tmp_path / 'answer.jsonl'}\n")
    (line,) = [json.loads(line) for line in (tmp_path / "answer.jsonl").read_text().splitlines()]
    assert (line["prompt"], line["tokens"]) == (join_ids(ids), NEW)
    assert line["answer"] == target.tokenizer.decode(generate_with_transformers(target, ids))


def test_an_interrupt_leaves_the_answers_that_were_finished(folder, learned, tmp_path, monkeypatch):
    def interrupt_after_first(answers, *_, **__):
        yield next(answers)
        raise KeyboardInterrupt

    rows = [{"id": f"p{i}", "text": join_ids(text[:4])} for i, text in enumerate(learned[1][:3])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "out.jsonl").write_text("of an earlier run")
    monkeypatch.setattr(generation, "track_progress", interrupt_after_first)
    words = (f"prompts={tmp_path / 'prompts.jsonl'}", f"output={tmp_path / 'out.jsonl'}", "batch=1")
    with pytest.raises(KeyboardInterrupt):
        run_generate(folder, *words)
    (line,) = map(json.loads, (tmp_path / "out.jsonl.partial").read_text().splitlines())
    assert (line["id"], line["tokens"], line["finish_reason"]) == ("p0", NEW, "length")
    assert (tmp_path / "out.jsonl").read_text() == "of an earlier run"
    monkeypatch.undo()
    run_generate(folder, *words)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (lines[0], [line["id"] for line in lines]) == (line, ["p0", "p1", "p2"])
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_answers_never_replace_their_prompts(tmp_path):
    with pytest.raises(UserError, match=r"output: must be another file than that of the prompts, got .*; choose"):
        GenerateConf(prompts=str(tmp_path / "rows.jsonl"), output=f"{tmp_path}/../{tmp_path.name}/rows.jsonl")


@pytest.mark.parametrize(
    ("family", "text", "end"),
    [
        ("llama-3.1", "As it is.", "<|eot_id|>"),
        ("llama-3.1", "As it", ""),
        ("qwen3", "<think>\nHm.\n</think>\n\nAs it is.", "<|im_end|>"),
        ("qwen3", "<think>\nHm. If it", ""),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>As", ""),
        ("harmony", "<|channel|>final<|message|>As it is.", "<|return|>"),
    ],
)
def test_a_line_of_a_chat_is_a_row_that_training_reads_as_it_was_generated(family, text, end):
    tokenizer = FAMILIES[family].tokenizer(family)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"properties": {}}}}]
    prompt_ids = ChatTemplate(tokenizer=tokenizer, arguments={"tools": tools}).render_prompt_ids(messages)
    prompt = EvalPrompt(
        id="a", category="b", ids=prompt_ids, messages=messages, template_kwargs={"tools": tools, "x": 1}
    )
    ids = tokenizer.encode(text + end, add_special_tokens=False)
    target = SimpleNamespace(tokenizer=tokenizer, eos_ids=[tokenizer.convert_tokens_to_ids(end)] if end else [])
    conf = GenerateConf(prompts="rows.jsonl", max_new_tokens=len(ids))
    row = parse_row(json.loads(describe_answer(conf, target, prompt, Generation(ids=ids))))
    assert isinstance(row, Conversation)
    assert (row.messages[:-1], row.tools, row.template) == (messages, tools, {"x": 1})
    [document], rejected = documents_from_row(row, DataConf(source=DataSource.jsonl, path="x"), tokenizer)
    assert (document.ids, rejected) == ([*prompt_ids, *ids], {})
    assert document.answer == [False] * len(prompt_ids) + [True] * len(ids)


@pytest.mark.parametrize(("stop", "reason"), [([], "length"), (["9"], "stop"), (["8"], "length")])
def test_a_stop_string_that_the_last_token_completes_ends_the_answer(target, stop, reason):
    prompt = EvalPrompt(id="a", category="b", ids=[3], text="3")
    conf = GenerateConf(prompts="rows.jsonl", max_new_tokens=3, stop=stop)
    line = json.loads(describe_answer(conf, target, prompt, Generation(ids=[5, 6, 9])))
    assert line["finish_reason"] == reason


@pytest.mark.parametrize(
    ("answers", "seconds", "expected"),
    [
        (
            [Generation(ids=[5, 6, 7], accepted=[3])],
            2.0,
            "3 tokens, 1.5 tokens/s: 1 from reading the prompt, 2 from 1 round, 2.00 per round",
        ),
        (
            [Generation(ids=[5, 6, 7], accepted=[3])] * 4,
            2.0,
            "12 tokens, 6.0 tokens/s: 4 from reading 4 prompts, 8 from 4 rounds, 2.00 per round",
        ),
        ([Generation(ids=[5])], 1.0, "1 token, 1.0 tokens/s: 1 from reading the prompt, 0 from 0 rounds"),
    ],
)
def test_every_token_is_accounted_for(answers, seconds, expected):
    assert describe_speed(answers, seconds) == expected


def test_graphs_are_announced_before_the_first_answer(learned, capsys):
    """A round and each prompt length have their graphs; eager calls stand for compiled ones."""
    device = replace(CPU, counts_shapes=True, ledger=GraphLedger())
    target = tiny_target(seed=0, device=device)
    decoder = Decoder(target, learned[0], chain(3), sampling=SamplingConf(), slots=128, batch=2)
    prompts = [
        EvalPrompt(id=str(n), category="all", ids=learned[1][0] * n) for n in (1, 2, 2)
    ]  # of 40, 80 and 80 tokens
    compile_graphs(decoder, prompts)
    first, announced, *graphs, last = capsys.readouterr().out.splitlines()
    assert first.startswith("compiling before the first answer: seconds to minutes a graph")
    assert announced == "graphs: 5 (begin 2, fused 1, prefill 2) announced"
    assert [line.partition(":")[0] for line in graphs] == [f"graph {i} of 5" for i in range(1, 6)]
    assert last == announced.replace("announced", "compiled")


def test_answers_shorter_than_a_warm_up_are_compiled_for(learned, capsys):
    target = tiny_target(seed=0, device=replace(CPU, counts_shapes=True, ledger=GraphLedger()))
    ids = learned[1][0]
    decoder = Decoder(target, learned[0], chain(3), sampling=SamplingConf(), slots=len(ids) + 2)
    compile_graphs(decoder, [EvalPrompt(id="a", category="all", ids=ids)])
    assert capsys.readouterr().out.splitlines()[-1] == "graphs: 3 (begin 1, fused 1, prefill 1) compiled"


def test_an_output_that_cannot_be_written_is_refused_before_a_weight_is_read(folder, target, tmp_path):
    target.model.config.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"text": "5 6 7"}\n')
    files = [f"target.path={tmp_path / 'target'}", f"prompts={tmp_path / 'prompts.jsonl'}"]
    with pytest.raises(UserError, match=r"^output: must be a writable file, got .* \(Is a directory\)"):
        run_generate(folder, *files, f"output={tmp_path}")


@pytest.mark.parametrize("prompt", ["", "  ", "\t \n"])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(UserError, match=r"^prompt: must have a character that is not white space"):
        GenerateConf(prompt=prompt)


def test_an_empty_string_ends_no_answer():
    with pytest.raises(UserError, match=r"^stop: must be strings that are not empty"):
        GenerateConf(prompt="a", stop=["b", ""])


@pytest.mark.parametrize("overrides", [[], ["prompt=a", "prompts=b"]])
def test_exactly_one_of_prompt_and_prompts_is_needed(folder, overrides):
    with pytest.raises(UserError, match=r"^prompt: needs a text, or prompts=FILE .* set one of"):
        run_generate(folder, *overrides)
