"""A user's mistake gives a single line and exit code 2, before a model is loaded if possible."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import data.prepare
import infer.eval
import infer.generate
import infer.tune
import train.__main__
from conf.entry import compose
from models.checkpoints import checkpoint_files
from models.checkpoints.fingerprints import tokenizer_fingerprint
from models.device.device import Device
from models.drafts.registry import load_draft
from models.io.errors import UserError
from models.io.files import PARTIAL_SUFFIX
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.target import Target
from tests.support.models.tiny import CPU, new_draft, tiny_target, tiny_tokenizer
from train.checks import check_run_device
from train.config.run import TrainConf


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Save a target, its draft, a truncated copy of the draft, and a file where a folder should be."""
    folder = tmp_path_factory.mktemp("refusals")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    new_draft(target).save(folder / "draft", target)
    shutil.copytree(folder / "draft", folder / "cut")
    weights = folder / "cut" / checkpoint_files.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(folder / "draft", folder / "foreign")
    (folder / "foreign" / checkpoint_files.CONFIG_FILE).write_text('{"architectures": ["OtherDraft"]}')
    (folder / "file").touch()
    (folder / "prompts.jsonl").write_text('{"text": "1 2 3"}\n')
    (folder / "bad.jsonl").write_text("1 2 3\n")
    (folder / "long.jsonl").write_text(f'{{"text": "{"1 2 3 " * 1000}"}}\n')
    return folder


@pytest.fixture
def refused(folder, monkeypatch, capfd):
    """Return a function that runs a refused command and returns its line and whether a target was loaded."""
    monkeypatch.chdir(folder)
    loaded = []

    def init(self, *args, name, honest=Target.__init__, **options):
        loaded.extend([name] if type(self) is Target else [])  # a plan builds only an outline
        honest(self, *args, name=name, **options)

    monkeypatch.setattr(Target, "__init__", init)

    def run(main, *arguments: str) -> tuple[str, bool]:
        monkeypatch.setattr(sys, "argv", [main.__module__, *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        *before, line = capfd.readouterr().err.splitlines()
        assert "Traceback" not in str(before)
        assert not before or loaded  # a single line, after the progress bar of a loaded model
        assert line.startswith("error: ")
        return line.removeprefix("error: "), bool(loaded)

    return run


EVAL = {
    "checkpoint=nowhere": "checkpoint: must be a folder with config.json, got nowhere",
    "checkpoint=3": "checkpoint: must be a folder with config.json, got 3",
    "checkpoint=[]": "checkpoint: must be a directory or a list of them, got []",
    "checkpoint=cut": "checkpoint: must be a complete file, got cut/model.safetensors",
    "checkpoint=[draft,cut]": "checkpoint: must be a complete file, got cut/model.safetensors",
    "tree=nope": "tree: no such option, got 'nope'; choose one of chain, dynamic, medusa-63,",
    "tree.deph=3": "tree.deph: no such key; did you mean tree.depth?",
    "tree.nodes=99": "tree.nodes: must be at most the",
    "device.threads=0": "device.threads: must be at least 1, got 0",
    "evaluation.prompts=nowhere": "evaluation.prompts: must be a readable JSONL file, got nowhere",
    "evaluation.prompts=bad.jsonl": "evaluation.prompts: every line must be a JSON object, got bad",
    "evaluation.prompts=long.jsonl": "evaluation.prompts: prompt and answer must fit in the 256 "
    "positions of target, got prompt 1 of 3000 tokens; shorten it or lower evaluation.max_new_tokens=",
    "+evaluation.template.a=1": "evaluation.template: needs prompts that a chat template renders, got {'a': 1} for",
    "evaluation.max_new_tokens=1": "evaluation.max_new_tokens: must be at least 2, got 1",
    "evaluation.sampling.top_p=0": "evaluation.sampling.top_p: must be in (0, 1], got 0",
    "output_dir=file": "output_dir: must be a writable folder, got file/eval (Not a directory)",
}


LATER = {  # what only a model shows
    "target.name=nobody/nothing": "target.name: must be a reachable model, got 'nobody/nothing'",
    "checkpoint=foreign": "checkpoint: architecture must be one of ",
    "tree.depth=17": "tree.depth: must be at most the 16 tokens that the draft can propose, got 17",
}


@pytest.mark.parametrize("mistake", EVAL | LATER)
def test_eval_refuses_a_mistake_before_a_model_is_loaded_if_possible(mistake, refused):
    overrides = {
        "checkpoint": "draft",
        "target.name": "target",
        "tree.nodes": 20,
        "tree.depth": 4,
        "evaluation.prompts": "prompts.jsonl",
        "device.compile": "false",
    }
    key, value = mistake.split("=")
    line, loaded = refused(infer.eval.main, *(f"{k}={v}" for k, v in (overrides | {key: value}).items()))
    assert line.startswith((EVAL | LATER)[mistake])
    assert not loaded or mistake in LATER


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("tree.depth=17", "tree.depth: must be at most the 16 tokens that the draft can propose"),
        ("output_dir=file", "output_dir: must be a writable folder, got file/demo (Not a directory)"),
        ("data=jsonl", "data.path: must be set for data.source=jsonl, got null"),
        ("evaluation.prompts=long.jsonl", "evaluation.prompts: prompt and answer must fit in the"),
        ("+evaluation.template.a=1", "evaluation.template: needs evaluation.prompts=FILE, which it renders"),
    ],
)
def test_train_refuses_before_a_model_is_loaded(mistake, message, refused):
    small = ["target.path=target", "data.demo.for_any_target=true", "draft.vocab_size=null"]
    line, loaded = refused(train.__main__.main, *small, "tree.nodes=20", "device.compile=false", mistake)
    assert line.startswith(message)
    assert not loaded


@pytest.mark.parametrize(
    ("command", "key", "words", "problem"),
    [
        (train.__main__, None, ["log=wandb", "device.compile=false"], "No API key configured"),
        (train.__main__, "mine", ["log.wandb=online"], "WANDB_API_KEY invalid: "),
        (infer.eval, None, ["log=wandb", "checkpoint=draft"], "No API key configured"),
        (infer.tune, None, ["log=wandb", "checkpoint=draft"], "No API key configured"),
        (data.prepare, None, ["log=wandb"], "No API key configured"),
    ],
)
def test_wandb_without_a_key_that_works_is_refused_first(command, key, words, problem, refused, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    line, loaded = refused(command.main, *words)
    assert line.startswith(f"log.wandb: online needs an API key, got none that works ({problem}")
    assert line.endswith("; set WANDB_API_KEY, or take log=wandb-offline or log=console")
    assert not loaded


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft=demo-medusa"], "optim.recompute: must be false for medusa, which runs no decoder layers, got true"),
        (["device=xla", "optim=adamw"], "optim.recompute: must be false with device=xla, whose compiler undoes it"),
    ],
)
def test_layers_run_again_only_where_that_saves_memory(overrides, message):
    conf = compose("train", TrainConf, [*overrides, "optim.recompute=true"])
    with pytest.raises(UserError) as refused:
        conf.check_settings()
    assert str(refused.value).startswith(message)
    compose("train", TrainConf, ["optim.recompute=true"]).check_settings()


def test_a_length_that_the_machine_would_pad_is_refused():
    conf = compose("train", TrainConf, ["optim=adamw", "data.row_length=200"])
    check_run_device(conf, CPU)
    with pytest.raises(UserError, match=r"data.row_length: must be a multiple of 128 .* take 256"):
        check_run_device(conf, replace(CPU, name="neuron", instance_type="trn2.48xlarge"))


def test_muon_is_refused_where_auto_finds_the_route_of_xla():
    class LazyDevice(Device):
        lazy = True

    conf, xla = compose("train", TrainConf, ["optim=muon"]), LazyDevice(**{**vars(CPU), "name": "xla"})
    conf.check_settings()
    with pytest.raises(UserError, match=r"^optim.name: must be adamw with device=xla, whose graphs"):
        check_run_device(conf, xla)
    check_run_device(compose("train", TrainConf, ["optim=adamw"]), xla)


def test_a_draft_of_another_tokenizer_is_refused(folder):
    other = tiny_target(seed=0)
    other.tokenizer_fingerprint = tokenizer_fingerprint(tiny_tokenizer(words=60))
    with pytest.raises(UserError, match="checkpoint: must be distilled for this tokenizer"):
        load_draft(folder / "draft", other)


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        (infer.eval.main, ["evaluation.prompts=prompts.jsonl"]),
        (infer.tune.main, ["prompts=prompts.jsonl"]),
        (infer.generate.main, ["prompt=1 2", "max_new_tokens=8"]),
    ],
    ids=["eval", "tune", "generate"],
)
def test_the_target_of_a_draft_with_another_tokenizer_is_not_loaded(refused, folder, command, overrides):
    shutil.copytree(folder / "target", folder / "other", dirs_exist_ok=True)
    tiny_tokenizer(words=60).save_pretrained(folder / "other")
    line, loaded = refused(command, "checkpoint=draft", "target.path=other", *overrides)
    assert line.startswith("checkpoint: must be distilled for this tokenizer (")
    assert not loaded


def test_a_published_draft_of_another_hidden_size_is_refused(folder, tmp_path):
    """It has no hashes: only its shapes differ."""
    published = tmp_path / "published"
    shutil.copytree(folder / "draft", published)
    weights = published / checkpoint_files.WEIGHTS_FILE
    save_file(load_file(weights), weights)
    wide = load_target(TargetConf(name=str(folder / "target")), CPU)
    load_draft(published, wide)  # it fits its own target
    wide.hidden_size = 48
    with pytest.raises(UserError, match="hidden size must be the target's 48, got 32"):
        load_draft(published, wide)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs an always full device")
def test_a_full_disk_is_refused_in_a_single_line(refused, folder):
    run = folder / "full" / "eval"
    run.mkdir(parents=True)
    (run / f"report.json{PARTIAL_SUFFIX}").symlink_to("/dev/full")
    line, _ = refused(
        infer.eval.main,
        "checkpoint=draft",
        "target.name=target",
        "output_dir=full",
        "evaluation.prompts=prompts.jsonl",
        "evaluation.max_new_tokens=2",
        "device.compile=false",
    )
    assert line.startswith("output_dir: must be a writable folder, got full/eval (No space left")


def test_eval_says_that_a_tree_is_deeper_than_the_draft_was_trained_for(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    overrides = (
        "checkpoint=draft target.name=target tree.depth=6 device.compile=false evaluation.prompts=prompts.jsonl "
        "evaluation.max_new_tokens=2"
    ).split()
    monkeypatch.setattr(sys, "argv", ["infer.eval", *overrides])
    infer.eval.main()
    assert "tree.depth: 6 is deeper than the 4 steps" in capfd.readouterr().out
