"""In a whole sequence of one name each command finds the output of the command before it."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import data.prepare
import infer.eval
import infer.generate
import infer.tune
import infer.warmup
import train.__main__
import train.plan
from conf.entry import CONF_DIR, compose
from conf.sequences import list_sequences
from data.config import DataSource
from data.prepare_config import PrepareConf
from infer.config import OWN_TARGET, EvalConf
from infer.tuning.config import TuneConf
from train.config.run import TrainConf, TrainPlanConf

SCHEMAS = {
    "prepare": PrepareConf,
    "train": TrainConf,
    "train_plan": TrainPlanConf,
    "train_warmup": TrainConf,
    "tune": TuneConf,
    "eval": EvalConf,
    "eval_warmup": EvalConf,
}
TRAINING = ("train", "train_plan", "train_warmup")
EVALUATING = ("tune", "eval", "eval_warmup")
PROMPTS = ["mixture.sources.rows.path=rows.jsonl"]  # of a source of the user's own
SHORTER = {
    "prepare": ("answers.max_new_tokens=8", lambda conf: conf.answers.max_new_tokens == 8),
    "train": ("optim.lr=2", lambda conf: conf.optim.lr == 2),
    "tune": ("nodes=[4]", lambda conf: conf.nodes == [4]),
    "eval": ("evaluation.max_new_tokens=8", lambda conf: conf.evaluation.max_new_tokens == 8),
}  # a shorter setting for a trial of each command, and its check
NAMES = list_sequences()


def compose_command(command: str, name: str, *typed: str) -> Any:
    needs_prompts = (command, name) == ("prepare", "smollm2-135m-eagle3")
    words = [f"experiment={name}", *(PROMPTS if needs_prompts else []), *typed]
    return compose(command, SCHEMAS[command], words)


def test_the_shipped_sequences_have_these_names_and_no_experiment_has_one_of_them():
    assert NAMES == [
        "gpt-oss-20b-eagle3",
        "llama-3.1-8b-eagle3",
        "qwen3-32b-1.7b",
        "qwen3-8b-eagle3",
        "qwen3-8b-medusa",
        "smollm2-135m-eagle3",
    ]
    own = {file.stem for file in (Path(CONF_DIR) / "experiment").glob("*.yaml")}
    assert not own & set(NAMES)  # Hydra would take the file of this name instead


@pytest.mark.parametrize("name", NAMES)
def test_each_command_reads_the_output_of_the_command_before_it(name):
    prepared = compose_command("prepare", name)
    assert prepared.run_name == name
    for command in TRAINING:
        trained = compose_command(command, name)
        assert trained.target == prepared.target
        assert trained.data.source is DataSource.prepared
        assert trained.data.path == f"{prepared.output_dir}/{prepared.run_name}"
        assert trained.run_name == name
        for command in EVALUATING:
            evaluated = compose_command(command, name)
            assert evaluated.checkpoint == [f"{trained.output_dir}/{trained.run_name}/checkpoint"]
            assert evaluated.target.name == OWN_TARGET  # that the checkpoint names
            assert evaluated.run_name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_changes_only_data_and_names_of_its_draft(name):

    trained = compose_command("train", name)
    draft = compose("train", TrainConf, [f"draft={read_draft(name)}", f"run_name={name}"])
    draft.data = trained.data
    assert trained == draft


def read_draft(name: str) -> str:
    return "qwen3-1.7b" if name == "qwen3-32b-1.7b" else name


@pytest.mark.parametrize(("name", "command"), list(itertools.product(NAMES[-2:], SHORTER)))
def test_an_override_behind_the_name_holds_in_every_command(name, command):
    word, holds = SHORTER[command]
    assert not holds(compose_command(command, name))
    assert holds(compose_command(command, name, word))


def test_the_command_line_wins_over_the_sequence():
    name = "qwen3-8b-eagle3"
    typed = ["mixture=one", *PROMPTS, "answers=endpoint", "answers.url=http://node:8000/v1"]
    prepared = compose_command("prepare", name, *typed, "target=llama-3.1-8b", "run_name=mine")
    assert list(prepared.mixture.sources) == ["rows"]
    assert prepared.answers.url == "http://node:8000/v1"
    assert prepared.target.name.startswith("meta-llama/")
    assert prepared.run_name == "mine"
    trained = compose_command("train", name, "data=ultrachat", "draft=qwen3-8b-medusa", "run_name=mine")
    assert trained.data == compose("train", TrainConf, ["draft=qwen3-8b-medusa"]).data
    assert trained.draft.method == "medusa"
    assert trained.run_name == "mine"
    assert compose_command("train", name, "data.path=mine").data.path == "mine"
    for command in EVALUATING:
        evaluated = compose_command(command, name, "checkpoint=[A,B]", "target.path=copy", "run_name=mine")
        assert evaluated.checkpoint == ["A", "B"]
        assert evaluated.target.location == "copy"
        assert evaluated.run_name == "mine"


@pytest.mark.parametrize("command", EVALUATING)
def test_without_an_experiment_the_newest_run_is_evaluated(command):
    assert compose(command, SCHEMAS[command], []).checkpoint is None


def test_prepared_data_without_an_experiment_needs_a_path():
    assert compose("train", TrainConf, ["draft=smollm2-135m-eagle3"]).data.path is None
    assert compose("train", TrainConf, ["data=prepared"]).data.path is None
    assert compose("train", TrainConf, ["experiment=demo-long", "data=prepared"]).data.path is None


@pytest.fixture
def run_refused(read_refusal, monkeypatch, tmp_path):
    """Return `read_refusal`, which runs commands in a folder of an empty target."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    return read_refusal


def test_train_names_the_command_that_prepares_its_data(run_refused):
    words = ["experiment=qwen3-8b-eagle3", "target.path=target"]
    line = run_refused(train.__main__.main, *words)
    assert line.startswith("error: data.path: must be a folder written by data.prepare, got output")
    assert line.endswith(f"run `python -m data.prepare {' '.join(words)}` first")
    elsewhere = run_refused(train.__main__.main, *words, "data.path=elsewhere")
    assert elsewhere.endswith("run `python -m data.prepare` first")


@pytest.mark.parametrize("command", [infer.tune, infer.eval, infer.warmup])
def test_evaluation_and_tuning_name_the_command_that_trains_the_draft(command, run_refused):
    line = run_refused(command.main, "experiment=llama-3.1-8b-eagle3")
    assert line == (
        "error: checkpoint: must be a folder, got outputs/train/llama-3.1-8b-eagle3/checkpoint, "
        "which is not there; run `python -m train experiment=llama-3.1-8b-eagle3` first"
    )


@pytest.mark.parametrize("command", [data.prepare, infer.tune, infer.eval])
def test_an_experiment_of_training_alone_is_refused_elsewhere(command, run_refused):
    assert run_refused(command.main, "experiment=demo-long") == (
        "error: experiment: must be a whole sequence for this command, got demo-long, which is of "
        f"training alone; choose one of {', '.join(NAMES)}"
    )


@pytest.mark.parametrize(
    ("command", "word", "key"),
    [
        (data.prepare, "draft=demo", "draft"),
        (data.prepare, "optim.lr=1", "optim"),
        (train.plan, "mixture=chat", "mixture"),
        (infer.eval, "draft=demo", "draft"),
        (infer.tune, "data.path=rows", "data"),
        (infer.generate, "experiment=none", "experiment"),
    ],
)
def test_keys_that_a_command_does_not_have_are_refused_beside_a_sequence_too(command, word, key, run_refused):
    experiment = [] if command is infer.generate else ["experiment=qwen3-8b-eagle3"]
    assert run_refused(command.main, *experiment, word).startswith(f"error: {key}")


def test_an_unknown_experiment_is_answered_with_the_shipped_ones(run_refused):
    line = run_refused(train.__main__.main, "experiment=none")
    assert line == (
        f"error: experiment: no such option, got 'none'; choose one of {', '.join(sorted([*NAMES, 'demo-long']))}"
    )
