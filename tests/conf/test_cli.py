"""A user's mistake ends in one line on stderr, checked word for word, and exit code 2."""

import argparse
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from conf import drafts
from conf.drafts import list_options
from conf.entry import CONF_DIR, USER_ERRORS, compose, entry_point, error_to_line
from conf.typed_text import quote_typed_text
from data.config import CaptureConf
from data.prepare_config import PrepareConf
from infer.config import DecodePlanConf, EvalConf
from models.io.errors import MAX_NAME_BYTES, UserError
from train.config.run import TrainConf

ROOT = Path(__file__).parents[2]


def list_names(group: str) -> str:
    files = [path.stem for path in (Path(CONF_DIR) / group).glob("*.yaml")]
    registered = [name for group_of_option, name, _ in list_options(TrainConf) if group_of_option == group]
    return ", ".join(sorted(files + registered))


DRAFTS = list_names("draft")
MISTAKES = {
    "draft=nope": f"draft: no such option, got 'nope'; choose one of {DRAFTS}",
    "draft=qwen3-8b-eagle-3": "draft: no such option, got 'qwen3-8b-eagle-3'; did you mean draft=qwen3-8b-eagle3?",
    "loss=kl": f"loss: no such option, got 'kl'; choose one of {list_names('loss')}",
    "draft.layrs=[1]": "draft.layrs: no such key; did you mean draft.layers?",
    "lr=1": "lr: no such key; did you mean optim.lr?",
    "log.color=1": "log.color: no such key; choose one of entity, project, wandb",
    "+log.color=1": "log.color: no such key; choose one of entity, project, wandb",
    "data.template.thinking=1": "data.template.thinking: no such key; to add it write +data.template.thinking=VALUE",
    "optim.lr=fast": "optim.lr: must be a number, got 'fast'; write one such as 0.1",
    "optim.steps=1.5": "optim.steps: must be an integer, got '1.5'; write one such as 1",
    "optim.lr=null": "optim.lr: must be set, got null; leave the key out for its default",
    "resume=maybe": "resume: must be true or false, got 'maybe'",
    "draft.layers=5": "draft.layers: must be a list, got one int",
    "device.name=gpu": "device.name: must be one of auto, cpu, cuda, neuron, xla, got 'gpu'",
    "optim.epochs=2": "optim.epochs: must be null if optim.steps is set, got 2.0 and 300 steps; "
    "set one of them to null",
    "optim.steps=0": "optim.steps: must be at least 1, got 0; raise it",
    "draft.layers=[5,1]": "draft.layers: must be strictly increasing and not empty, got [5, 1]; null takes low, middle "
    "and high",
    "draft.layers=[]": "draft.layers: must be strictly increasing and not empty, got []; null takes low, middle and "
    "high",
    "draft.vocab_size=0": "draft.vocab_size: must be at least 1, got 0; null takes all of the target's",
    "steps": "command line: must be KEY=VALUE, got 'steps'; see --help",
    "target=null": "command line: a group takes the name of an option, got a value of type NoneType; see --help",
    "held_out=small": "held_out: must be keys with values, got small",
    "draft=a,b": "draft: must be one value, got 'a,b'; for a run of each add -m, for a list write draft=[a,b]",
    "run_nme=é": "run_nme: no such key; did you mean run_name?",
    "optim.lr=1é": "optim.lr: must be a value that Hydra reads, got '1é'; for text write "
    """'optim.lr="1é"'""",
    "draft.layers=[1": "draft.layers: must be a value that Hydra reads, got '[1'; for text write "
    """'draft.layers="[1"'""",
    "seed=-1": "seed: must be in 0..2^48 - 1, got -1; 0 is the default",
    "data.seed=-2": "data.seed: must be in 0..2^48 - 1, got -2; 0 is the default",
    "evaluation.sampling.seed=281474976710656": "evaluation.sampling.seed: must be in 0..2^48 - 1, "
    "got 281474976710656; 0 is the default",
    "run_name=": "run_name: must not be empty, got ''; if the text comes from a shell variable, "
    "set it, else leave the key out",
    "run_name=../x": "run_name: must name a folder below output_dir, in at most 200 bytes, got ../x; "
    "to write elsewhere set output_dir",
    f"run_name={300 * 'x'}": "run_name: must name a folder below output_dir, in at most 200 bytes, got "
    f"{300 * 'x'}; to write elsewhere set output_dir",
    "~draft": "draft: must be set, got nothing; add draft=VALUE",
}


ABSENT = {  # groups of training, which a recipe adds to no other command
    "evaluation.turns=9": (DecodePlanConf, "infer_plan"),
    "+optim.banana=5": (DecodePlanConf, "infer_plan"),
    "optim.lr=-5": (DecodePlanConf, "infer_plan"),
    "data=jsonl": (DecodePlanConf, "infer_plan"),
    "~optim": (DecodePlanConf, "infer_plan"),
    "tree.depth=3": (CaptureConf, "capture"),
    "loss=ce": (CaptureConf, "capture"),
    "++evaluation.prompts=a.jsonl": (CaptureConf, "capture"),
}


@pytest.mark.parametrize("override", ABSENT)
def test_a_group_without_effect_is_no_key_of_a_command(override):
    schema, name = ABSENT[override]
    with pytest.raises(USER_ERRORS) as refused:
        compose(name, schema, [override])
    group = re.split(r"[.=]", override.lstrip("+~"))[0]
    assert error_to_line(refused.value).startswith(f"{group}: no such key")


def test_a_section_that_is_a_group_of_another_command_is_told_from_a_key():
    with pytest.raises(USER_ERRORS) as refused:
        compose("eval", EvalConf, ["parallel=tensor"])
    assert error_to_line(refused.value) == (
        "parallel: no such key or group in this command; a section has keys of its own, as in device.name=cpu; "
        "see --help"
    )


@pytest.mark.parametrize(("schema", "name"), [(CaptureConf, "capture"), (PrepareConf, "prepare")])
def test_a_key_without_effect_is_refused(schema, name):
    with pytest.raises(UserError) as refused:  # the commands plan no memory
        compose(name, schema, ["device.memory_gib=null"])
    assert str(refused.value) == (
        "device.memory_gib: must be left out, as it has no effect here, got device.memory_gib=null"
    )


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs `python -m train` with a main that records its configurations."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, fail: BaseException | None = None) -> list[TrainConf]:
        configs = []

        @entry_point("train", TrainConf)
        def main(conf: TrainConf) -> None:
            configs.append(conf)
            if fail:
                raise fail

        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        main()
        return configs

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered_in_one_line(mistake, command, read_refusal):
    assert read_refusal(lambda: command(mistake)) == f"error: {MISTAKES[mistake]}"


def test_user_errors_of_a_run_are_printed_in_one_line_too(command, read_refusal):
    message = "target.name: must be reachable, got 'x'; give a local path"
    assert read_refusal(lambda: command(fail=UserError(message))) == f"error: {message}"


def test_ctrl_c_ends_with_the_exit_code_of_an_interrupt(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command(fail=KeyboardInterrupt())
    assert (stop.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_hydra_leaves_loggers_as_they_are(command):
    logger = logging.getLogger("models.device.opening")
    command()
    assert not logger.disabled
    assert not logging.root.handlers


def test_bugs_keep_their_traceback(command):
    with pytest.raises(ValueError, match="a bug"):
        command(fail=ValueError("a bug"))


def test_an_unknown_key_in_a_file_names_the_file(command, read_refusal, tmp_path):
    (tmp_path / "mine" / "draft").mkdir(parents=True)
    text = "defaults: [schema/eagle3, _self_]\nttt_step: 3\n"
    (tmp_path / "mine" / "draft" / "wrong.yaml").write_text(text)
    line = read_refusal(lambda: command("--config-dir", "mine", "draft=wrong"))
    expected = "draft.ttt_step: no such key; did you mean draft.ttt_steps?"
    assert line == f"error: {expected} (in draft/wrong.yaml)"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bare: {method: eagle3}", "bare.recipe: must have keys, got None; name at least its target"),
        (
            "bare: {recipe: {target: demo}}",
            "bare.method: must be one of .*, got None; a new method is listed in METHODS",
        ),
        ("bare: {method: eagle, recipe: {target: demo}}", "bare.method: must be one of .*, got eagle; a new method"),
        ("bare: {method: eagle3, ttt_step: 3, recipe: {target: demo}}", r"ttt_steps\? \(in conf/drafts.yaml, bare\)"),
    ],
)
def test_a_mistake_in_an_entry_of_a_draft_names_the_entry(command, capsys, tmp_path, monkeypatch, entry, message):
    shipped = (Path(CONF_DIR) / "drafts.yaml").read_text()
    (tmp_path / "drafts.yaml").write_text(f"{shipped}\n{entry}\n")
    monkeypatch.setattr(drafts, "CONF", tmp_path)
    store = ConfigStore.instance()
    monkeypatch.setattr(
        store, "repo", store.repo | {"draft": dict(store.repo["draft"])}
    )  # forgets the entry afterwards
    drafts.load_drafts.cache_clear()
    try:
        with pytest.raises(SystemExit):
            command("draft=bare")
    finally:
        drafts.load_drafts.cache_clear()
    assert re.search(message, capsys.readouterr().err)


def test_an_unknown_key_of_a_source_is_refused_even_if_it_is_added():
    source = ["mixture=one", "mixture.sources.rows.path=rows.jsonl"]
    with pytest.raises(UserError, match=r"^mixture\.sources\.rows\.pth: no such key; did you mean"):
        compose("prepare", PrepareConf, [*source, "+mixture.sources.rows.pth=other.jsonl"])


def test_a_multirun_gives_each_job_its_own_folder(command, tmp_path):
    jobs = command("-m", "seed=1,2", "draft=demo,qwen3-8b-eagle3")
    names = [conf.run_name for conf in jobs]
    assert names == ["demo-seed=1", "qwen3-8b-eagle3-seed=1", "demo-seed=2", "qwen3-8b-eagle3-seed=2"]


def test_names_of_many_overrides_are_cut_and_stay_different(command, tmp_path):
    many = [f"data.path={tmp_path}/{50 * 'x'}", "data=jsonl", f"target.path={tmp_path}/{50 * 'y'}", "optim.epochs=4"]
    names = [conf.run_name for conf in command("-m", *many, "optim.steps=null", "optim.lr=1e-3,1e-4")]
    assert len(set(names)) == 2
    assert {len(name.encode()) for name in names} == {MAX_NAME_BYTES}


def test_a_multirun_splits_text_at_commas_and_keeps_it_as_typed(command, tmp_path):
    jobs = command("-m", "run_name=1.50,'a, b'")
    assert [conf.run_name for conf in jobs] == ["1.50", "a, b"]
    names = [conf.run_name for conf in command("-m", "data=jsonl", "data.path=1.50,café.jsonl")]
    assert names == [f"demo-data=jsonl-data.path={path}" for path in ("1.50", "café.jsonl")]
    choice = ["data.path=choice(a,b)"]
    assert quote_typed_text(choice, TrainConf, is_sweep=True) == choice


def test_a_multirun_writes_below_the_home_folder(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command("-m", "seed=1,2", "output_dir=~/out")[0].output_dir == f"{tmp_path}/home/out"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_argparse_of_python_3_14_accepts_the_help_of_every_argument(command, monkeypatch):
    def check_help(self, action):  # as argparse of Python 3.14 does for each new argument
        try:
            _ = action.help and "%" in action.help
        except TypeError as error:
            raise ValueError("badly formed help string") from error

    def add_action(self, action):
        self._check_help(action)
        return add(self, action)

    add = argparse.ArgumentParser._add_action
    monkeypatch.setattr(argparse._ActionsContainer, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "_add_action", add_action)
    with pytest.raises(ValueError, match="badly formed"):
        argparse._ActionsContainer._check_help(None, argparse.Action([], "x", help=object()))  # pyright: ignore
    assert command("seed=3")[0].seed == 3


def test_the_entry_point_creates_no_folder(command, tmp_path):
    assert command("seed=3")[0].seed == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--cfg", "job", "--resolve"]])
def test_cfg_prints_the_config_and_runs_nothing(flags, command, capsys):
    assert command(*flags) == []
    assert "max_new_tokens" in capsys.readouterr().out


def test_help_prints_the_groups_of_the_command_and_its_config(command, capsys):
    """Hydra would list the groups of other commands too, which this one refuses."""
    with pytest.raises(SystemExit) as stop:
        command("--help")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("python -m train ")
    groups, config = out.split("== Config ==")
    assert f"draft: {DRAFTS}" in groups
    names = [line.split(":")[0] for line in groups.splitlines() if ": " in line]
    assert " ".join(names) == "data device draft evaluation experiment log loss optim parallel recipe target tree"
    assert "max_new_tokens" in config


def test_the_command_of_a_module_answers_a_mistake_in_one_line():
    command = [sys.executable, "-m", "train", "draft=nope"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"error: {MISTAKES['draft=nope']}\n"
