"""A draft of a real target is evaluated, chosen and tuned on prompts held out of its own data."""

import json
import random
import shutil
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import infer.eval
import infer.tune
from conf.entry import compose
from data.config import DataConf, DataSource, TurnSelection
from data.document_cache import read_documents
from data.eval_prompts.held_out_files import (
    FINAL_FILE,
    SELECTION_FILE,
    find_held_out_file,
    format_data_name,
    read_longest_row,
)
from data.eval_prompts.prompts import fingerprint_prompts, load_eval_prompts
from data.sources.prepared_rows import write_prepared_rows
from data.sources.rows import Conversation
from data.sources.text_hashes import prompt_hashes
from data.sources.training_rows import read_training_rows as rows_of
from infer.config import EvaluationConf
from infer.measure.context_limits import max_answer_tokens
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.loading import load_target
from tests.support.commands.own_target import save_target
from tests.support.data import captured, read_lines, write_lines
from tests.support.data.chat import asked
from tests.support.data.families import FAMILIES
from tests.support.models.tiny import CPU
from train.__main__ import main
from train.config.run import TrainConf
from train.rows.held_out import hold_out

pytestmark = pytest.mark.no_shapes  # commands

FAMILY = FAMILIES["qwen3"]
FEW = ["device.compile=false", "device.threads=1"]
TREE = ["tree=chain", "tree.depth=2"]


def build_conversations(count: int) -> list[dict]:
    """Build conversations of up to three turns in two categories; three begin with the same question."""
    draw, rows = random.Random(0), []
    for number in range(count):
        messages = []
        for turn in range(1 + number % 3):
            topic = "the weather" if turn == 0 and number % 9 == 4 else f"thing {number}.{turn}"
            answer = " ".join(draw.choices(["it", "is", "cold", "well", "there"], k=6))
            messages += [{"role": "user", "content": f"Tell me of {topic}."}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "category": ("chat", "code")[number % 5 == 0]})
    return rows


def build_conf(folder: Path, *overrides: str) -> TrainConf:
    settings = {
        "target.name": folder / "target",
        "draft.layers": [0, 1, 2],
        "draft.ttt_steps": 2,
        "draft.vocab_size": "null",
        "data": "jsonl",
        "data.path": folder / "rows.jsonl",
        "data.row_length": 256,
        "data.turns": "each",
        "evaluation.max_new_tokens": 3,
        "evaluation.batch_sizes": [],
        "optim": "adamw",
        "optim.steps": 1,
        "optim.rows_per_step": 2,
        "held_out.report": 6,
        "held_out.selection": 3,
        "run_name": "run",
        "output_dir": folder / "outputs" / "train",
    }
    return compose("train", TrainConf, [*(f"{k}={v}" for k, v in settings.items()), *FEW, *TREE, *overrides])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Finish a run on conversations of several turns, with a document per turn."""
    folder = tmp_path_factory.mktemp("own")
    save_target(folder / "target", num_hidden_layers=4, max_position_embeddings=512, initializer_range=0.02)
    write_lines(folder / "rows.jsonl", build_conversations(27))
    main.__wrapped__(build_conf(folder))
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Path:
    return folder / "outputs" / "train" / "run"


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILY.tokenizer("qwen3")


@pytest.fixture
def command(folder, monkeypatch, capfd):
    """Return a function that runs a command in the folder of the run and returns its error output."""
    monkeypatch.chdir(folder)

    def call(main, *arguments: str, refused: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", [main.__module__, *FEW, *TREE, *arguments])
        with pytest.raises(SystemExit) if refused else nullcontext():
            main()
        return capfd.readouterr().err

    return call


def read_report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_the_report_uses_prompts_held_out_of_the_runs_own_data(folder, run, tokenizer):
    prompts = load_eval_prompts(tokenizer, str(run / FINAL_FILE), limit=None)
    described = read_report(run)["setup"]["prompts"]
    assert (described["count"], described["chat_template"]) == (6, 6)
    assert set(described["by_category"]) == {"chat", "code"}
    assert described["source"] == f"held out from {folder / 'rows.jsonl'}"
    assert described["sha256"] == fingerprint_prompts(prompts)
    _, _verdict, first, *_ = (run / "report.md").read_text().split("\n\n")
    assert f"held out from {folder / 'rows.jsonl'}; through the chat template" in first


def test_held_out_prompts_are_the_prompts_that_serving_would_send(folder, run, tokenizer):
    """Each is the template's rendering of a turn with the history before it."""
    rendered = {
        tuple(
            tokenizer.apply_chat_template(
                row["messages"][: turn + 1], add_generation_prompt=True, enable_thinking=False, return_dict=True
            )["input_ids"]
        )
        for row in read_lines(folder / "rows.jsonl")
        for turn in range(0, len(row["messages"]), 2)
    }
    held = [tuple(row["ids"]) for name in (FINAL_FILE, SELECTION_FILE) for row in read_lines(run / name)]
    assert len(held) == 9
    assert set(held) <= rendered


def test_no_held_back_conversation_is_learned_in_any_turn(folder, run, tokenizer):
    """The run stores hashes of every prompt that it learned."""
    learned = set(np.load(run / "training_prompts.npy").tolist())
    num_trained, num_held = 0, 0
    held = {
        tokenizer.decode(row["ids"]).partition("<|im_end|>")[0]
        for name in (FINAL_FILE, SELECTION_FILE)
        for row in read_lines(run / name)
    }
    for document in read_documents(build_conf(folder).data, tokenizer):
        ids = document.ids[: document.answer.index(True)]
        known = bool(learned & set(prompt_hashes(tokenizer.decode(ids, skip_special_tokens=True), "")))
        first = tokenizer.decode(ids).partition("<|im_end|>")[0]
        assert known == (first not in held)
        num_trained, num_held = num_trained + known, num_held + (not known)
    assert num_held > 9  # with other turns of the same conversations, and with all three of a question or none
    assert num_trained
    checked = read_report(run)["setup"]["prompts"]["contamination"]["run"]
    assert (checked["checked"], checked["count"]) == (True, 0)
    judged, choosing = ({tuple(r["ids"]) for r in read_lines(run / name)} for name in (FINAL_FILE, SELECTION_FILE))
    assert not judged & choosing


def test_a_finished_run_is_evaluated_on_the_same_prompts_again(folder, run, capsys):
    before = read_report(run)["setup"]["prompts"]
    (run / "report.json").unlink()
    main.__wrapped__(build_conf(folder))
    assert "is trained already" in capsys.readouterr().out
    assert read_report(run)["setup"]["prompts"] == before


def test_eval_takes_the_prompts_of_the_run(run, command, folder):
    command(infer.eval.main, "evaluation.max_new_tokens=2", "evaluation.batch_sizes=[]")
    ours = read_report(folder / "outputs/infer.eval/eval")
    assert ours["setup"]["prompts"]["sha256"] == read_report(run)["setup"]["prompts"]["sha256"]
    assert ours["setup"]["prompts"]["source"] == read_report(run)["setup"]["prompts"]["source"]
    assert ours["drafts"][0]["longest_row"] == 256


def test_trees_are_tuned_on_the_prompts_that_chose_the_checkpoint(run, command, folder, tokenizer):
    selection = fingerprint_prompts(load_eval_prompts(tokenizer, str(run / SELECTION_FILE), limit=None))
    few = ["depth=1", "max_new_tokens=2", "ranks=2"]
    command(infer.tune.main, *few, "nodes=[2]", "batch=[1]", "repeats=1", "ngram_tokens=0")
    tuned = json.loads((folder / "outputs/infer.tune/tune/tune.json").read_text())
    assert tuned["prompts"] == {"count": 3, "sha256": selection}
    assert selection != read_report(run)["setup"]["prompts"]["sha256"]


@pytest.mark.parametrize(("module", "key"), [(infer.eval, "evaluation.prompts"), (infer.tune, "prompts")])
def test_a_checkpoint_that_came_without_prompts_is_refused(run, command, folder, module, key):
    """The demo's prompts are not a silent default."""
    shutil.copytree(run / "checkpoint", folder / "foreign" / "draft", dirs_exist_ok=True)
    refused = command(module.main, "checkpoint=foreign/draft", refused=True).splitlines()[-1]
    assert refused.startswith(f"error: {key}: must be named for a draft whose run kept no prompts of its own, got null")
    assert refused.endswith(f"give {key}=FILE")


def test_drafts_side_by_side_must_share_their_prompts(tmp_path):
    target = TargetConf(name="some/target")
    runs = [tmp_path / name / "checkpoint" for name in "ab"]
    for checkpoint in runs:
        checkpoint.mkdir(parents=True)
        write_lines(checkpoint.parent / FINAL_FILE, [{"ids": [1, 2]}])
    assert find_held_out_file(runs, target, FINAL_FILE, key="k") == str(tmp_path / "a" / FINAL_FILE)
    write_lines(tmp_path / "b" / FINAL_FILE, [{"ids": [1, 3]}])
    with pytest.raises(UserError, match=r"^k: must be named for drafts .* different prompts"):
        find_held_out_file(runs, target, FINAL_FILE, key="k")
    (tmp_path / "b" / FINAL_FILE).unlink()
    with pytest.raises(UserError, match="must be named for a draft whose run kept no prompts"):
        find_held_out_file(runs, target, FINAL_FILE, key="k")


def test_the_demo_has_its_own_prompts(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint"
    assert find_held_out_file([checkpoint], TargetConf(), FINAL_FILE, key="k") == "demo"
    copy = TargetConf(path=str(tmp_path))  # another model under the name of the default
    with pytest.raises(UserError, match="must be named"):
        find_held_out_file([checkpoint], copy, FINAL_FILE, key="k")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("data: {source: demo, row_length: 128}")
    assert find_held_out_file([checkpoint], copy, FINAL_FILE, key="k") == "demo"
    assert read_longest_row(checkpoint) == 128


@pytest.mark.parametrize(("context", "demo", "tokens"), [(None, True, 64), (4096, False, 256), (100, False, 50)])
def test_answers_are_long_where_the_target_is_real_and_has_room(context, demo, tokens):
    assert max_answer_tokens(EvaluationConf(), context, demo=demo) == tokens
    assert max_answer_tokens(EvaluationConf(max_new_tokens=9), context, demo=demo) == 9


# --- prompts that data.prepare held out, and stores ----------------------------------------------------


def write_prepared(folder: Path, *, held: int) -> Path:
    """Write rows as data.prepare does, with the template's arguments in the rows."""
    rows = [replace(row, template={"enable_thinking": False}) for row in asked(30)]
    for split, part in (("held_out", rows[:held]), ("train", rows[held:])):
        folder.mkdir(exist_ok=True)
        write_prepared_rows(folder / f"{split}-00000-of-00001.parquet", iter(part), {})
    return folder


def run_hold_out(folder: Path, data: Path, *overrides: str):
    settings = build_conf(folder, "data=prepared", f"data.path={data}", "data.row_length=256", *overrides)
    target = load_target(settings.target, CPU)
    split, held = hold_out(settings, target, read_documents(settings.data, target.tokenizer))
    return split.training, held, target.tokenizer


def test_prompts_that_data_prepare_held_out_evaluate_the_draft(folder, tmp_path):
    data = write_prepared(tmp_path / "data", held=10)
    learned, held, tokenizer = run_hold_out(folder, data)
    assert {row["held_out_of"] for row in held.final} == {f"{data} by data.prepare"}
    assert {row["id"] for row in held.final} <= {f"row-{number}" for number in range(10)}
    assert len(held.final) == 6
    assert held.final[0]["template"] == {"enable_thinking": False}
    write_lines(tmp_path / FINAL_FILE, held.final)
    (first, *_) = load_eval_prompts(tokenizer, str(tmp_path / FINAL_FILE), limit=1)
    assert first.chat_template
    assert tokenizer.decode(first.ids).endswith("<think>\n\n</think>\n\n")
    assert len(learned) < len(
        read_documents(DataConf(source=DataSource.prepared, path=str(data), turns=TurnSelection.each), tokenizer)
    )


def test_too_few_prompts_of_data_prepare_are_filled_up_from_the_data(folder, tmp_path):
    data = write_prepared(tmp_path / "data", held=2)
    _, held, _ = run_hold_out(folder, data)
    assert [row["held_out_of"] for row in held.final] == [f"{data} by data.prepare"] * 2 + [str(data)] * 4


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    data = write_prepared(tmp_path / "data", held=10)
    _, held, _ = run_hold_out(folder, data, "evaluation.max_new_tokens=483")
    assert "prompts held out from" in caplog.text
    assert "a prompt of more than 29 tokens" in caplog.text
    assert all("ids" not in row or len(row["ids"]) <= 29 for row in held.final)


def test_data_without_prompts_to_hold_out_are_refused_in_a_single_line(folder, tmp_path):
    write_lines(tmp_path / "single.jsonl", build_conversations(1))
    with pytest.raises(UserError, match=r"^held_out.report: must leave as many .* got 1 in .*single"):
        run_hold_out(folder, tmp_path, "data=jsonl", f"data.path={tmp_path / 'single.jsonl'}")
    named = ["evaluation.prompts=demo", "data.overlap=8", "data.row_length=16"]
    long = tmp_path / "long.jsonl"
    write_lines(long, [{"prompt": "word " * 40, "completion": "end"} for _ in range(9)])
    with pytest.raises(UserError, match=r"^data\.row_length: must hold a prompt .*long.*, got 16 "):
        run_hold_out(folder, tmp_path, "data=jsonl", f"data.path={long}", *named)
    with pytest.raises(UserError, match=r"^held_out.report: must be at least 1 without evaluation"):
        build_conf(folder, "held_out.report=0").check_settings()


def test_a_store_knows_the_conversation_of_each_document(folder, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    capture = captured.conf(tmp_path, draft=build_conf(folder).draft)
    capture = replace(capture, data=replace(build_conf(folder).data, turns=TurnSelection.each))
    target = load_target(TargetConf(name="tiny", path=str(tmp_path / "target")), CPU)
    needs = replace(captured.EAGLE3, layers=[0, 1, 2])
    store = captured.opened(captured.captured(capture), target, needs)
    live = read_documents(capture.data, target.tokenizer)
    assert store.documents.conversation.tolist() == live.conversation.tolist()
    assert len(set(live.conversation.tolist())) == 27 < len(live)


def test_names_say_where_prompts_are_from():
    assert format_data_name(DataConf(source=DataSource.dataset, path="org/chat", split="train_sft")) == (
        "org/chat:train_sft"
    )
    assert format_data_name(DataConf(source=DataSource.captured, path="a")) == "the feature store a"


def test_only_conversations_have_a_number(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [*build_conversations(2), {"text": "plain"}])
    data = DataConf(source=DataSource.jsonl, path=str(tmp_path / "rows.jsonl"))
    numbered = [(isinstance(r, Conversation), r.conversation) for r in rows_of(data, Counter())]
    assert numbered == [(True, 0), (True, 1), (False, None)]
