"""`python -m train` on a small target goes from a data file to a report."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.entry import compose
from infer.config import EvaluationConf
from infer.inputs.checkpoint_paths import find_tracked_run
from infer.tuning import cost_model, report_tuning
from models.checkpoints.saved_states import find_newest_state, read_progress_file
from models.device import opening
from models.io.errors import UserError
from models.io.tracking import TrackedRun
from models.targets.target import Target
from tests.support.data import read_lines, write_lines
from tests.support.models.tiny import CPU, chain, new_draft, sampled_texts, tiny_target, tree
from tests.support.reports.cards import read_card, read_serve_line
from tests.support.reports.wandb_files import logged, read_axes, run_ids
from tests.support.runs.toy_run import metrics, weights
from train import distillation, trainer
from train.__main__ import main
from train.config.run import ParallelConf, TrainConf
from train.distributed.build import build_parallel
from train.quick_eval import build_quick_eval
from train.rows.features import TargetFeatures
from train.rows.packed_rows import _answer_with_target
from train.run.folder import open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Save a target, texts of its own to learn from, and prompts for the evaluation."""
    folder = tmp_path_factory.mktemp("command")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    texts = sampled_texts(target, count=12, length=32)
    rows = [{"ids": ids, "answer": [t >= 4 for t in range(32)]} for ids in texts]
    write_lines(folder / "rows.jsonl", rows)
    prompts = [{"id": str(i), "category": "abc"[i % 3], "text": join_words(ids[:4])} for i, ids in enumerate(texts[:3])]
    write_lines(folder / "prompts.jsonl", prompts)
    return folder


def join_words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def build_conf(folder: Path, *overrides: str, without: tuple[str, ...] = ()) -> TrainConf:
    settings = {
        "target.name": folder / "target",
        "data": "jsonl",
        "data.path": folder / "rows.jsonl",
        "data.row_length": 64,
        "evaluation.prompts": folder / "prompts.jsonl",
        "evaluation.max_new_tokens": 4,
        "draft.ttt_steps": 2,
        "draft.vocab_size": "null",
        "optim": "adamw",
        "optim.steps": 6,
        "optim.rows_per_step": 2,
        "device.compile": "false",
        "device.threads": 1,
        "interval.eval": 3,
        "held_out.selection": 2,
        "interval.save": 3,
        "interval.log": 2,
        "run_name": "run",
        "output_dir": folder / "out",
    }
    options = [f"{key}={value}" for key, value in settings.items() if key not in without]
    return compose("train", TrainConf, [*options, *overrides])


def run_training(conf: TrainConf):
    main.__wrapped__(conf)


def test_a_run_writes_a_checkpoint_and_a_report_and_is_not_repeated(folder, capsys):
    run_training(build_conf(folder, "log.wandb=offline"))
    output = capsys.readouterr().out
    assert "norm_output" not in output
    assert "tune: " not in output  # the demo leaves it out
    assert "deeper than the 2 steps that the draft was trained for" in output
    assert "draft: captures what enters layers [1, 3, 5] of 6\n" in output
    out = folder / "out" / "run"
    left = {path.name for path in out.iterdir()}
    assert left >= {"config.yaml", "metrics.jsonl", "report.json", "report.md", "report.html"}
    assert left >= {"checkpoint", "state"}
    report = json.loads((out / "report.json").read_text())
    tree = report["overall"]["modes"]["run/tree"]["figures"]
    assert tree["acceptance_length"]["mean"] >= 1
    evaluated = [line for line in metrics(out) if "eval/acceptance_length" in line]
    assert report["drafts"][0]["training"] == [
        {"tokens": line["train/tokens"], "tau": line["eval/acceptance_length"]} for line in evaluated
    ]
    assert report["drafts"][0]["tuned_tree"] is None
    assert len(evaluated) == 2
    assert "run: too few evaluations to tell whether tau still rises: 2, and" in output
    check_wandb_run(out)

    check_card(out / "checkpoint", folder)

    trained = weights(out)
    run_training(build_conf(folder))
    assert "is trained already" in capsys.readouterr().out
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(out).items())

    with pytest.raises(UserError, match=r"optim\.lr: the run was started with 0\.001, got 0\.01"):
        run_training(build_conf(folder, "optim.lr=0.01"))
    again = build_conf(folder, "optim.lr=0.01", "resume=false")
    assert open_run(again, build_parallel(ParallelConf(), CPU, trackers=[])).progress.step == 0
    assert {path.name for path in out.iterdir()} == {"launch", "lock", "wandb", "replaced"}


def check_wandb_run(out: Path):
    """Check that its curves have axes that may repeat, and that later results of the draft continue it."""
    assert read_axes(out) == {"train/*": "step", "eval/*": "train/tokens"}
    values = logged(out)
    evaluated = [line for line in values if "eval/acceptance_length" in line]
    assert [line["train/tokens"] for line in evaluated] == [
        line["train/tokens"] for line in metrics(out) if "eval/acceptance_length" in line
    ]
    assert values[-1]["report/tree/acceptance_length"] >= 1
    ((run_id, project, _),) = run_ids(out)
    tracked = TrackedRun(id=run_id, project=project, entity=None)
    assert find_tracked_run([out / "checkpoint"]) == tracked


def check_card(checkpoint: Path, folder: Path) -> None:
    """Check that the card has the serving command and the figures (see tests/train/run/test_model_card.py)."""
    card = read_card(checkpoint)
    assert card.data.tags == ["speculative-decoding", "draft", "eagle3"]
    assert read_serve_line(card)[0] == str(folder / "target")
    assert "| all (3) | tree |" in card.text
    best_step = read_progress_file(find_newest_state(checkpoint.parent))["progress"]["best_step"]
    tokens = next(int(m["train/tokens"]) for m in metrics(checkpoint.parent)[::-1] if m["step"] <= best_step)
    assert f"| tokens | {tokens:,}, of which" in card.text


@pytest.mark.slow
@pytest.mark.system
def test_medusa2_starts_from_the_heads_of_a_first_stage(folder, capsys):
    """A single command trains both stages and does not repeat the first; here the second trains only the target."""
    overrides = (
        "draft=demo-medusa2 draft.heads=2 draft.heads_steps=4 draft.heads_weight=0 optim.steps=2 tree=chain "
        "tree.depth=2 run_name=medusa2"
    ).split()
    staged = build_conf(folder, *overrides, without=("draft.ttt_steps", "draft.vocab_size"))
    out = folder / "out" / "medusa2"
    run_training(staged)
    assert f"first stage: medusa, in {out / 'first_stage'}" in capsys.readouterr().out
    assert metrics(out / "first_stage")[-1]["step"] == 4
    assert metrics(out)[-1]["step"] == 2
    first, last = (load_heads(path) for path in (out / "first_stage", out))
    assert first["blocks.0.layers.0.weight"].abs().max() > 0  # they start as zeros
    assert all(torch.equal(first[name], tensor) for name, tensor in last.items())
    run_training(staged)
    assert "first stage" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        ["draft=demo-medusa2", "draft.heads=2", "draft.heads_steps=2", "tree.depth=2"],
        ["draft=demo-hydra", "optim=muon"],
        ["draft=demo", "draft.ttt_steps=2", "data.keep_features=true"],
    ],
    ids=["two stages", "two optimizers", "features in memory"],
)
def test_memory_of_training_is_free_before_a_next_stage_and_before_the_report(folder, monkeypatch, tmp_path, overrides):
    taken: list[weakref.ref] = []
    build, evaluate = trainer.build_optimizers, distillation.evaluate_drafts
    keep = TargetFeatures.keep_all

    def watch_build(conf, draft, *args, **kwargs):
        assert not [ref() for ref in taken if ref() is not None]
        optimizers, schedules = build(conf, draft, *args, **kwargs)
        taken.extend(map(weakref.ref, [draft, *optimizers, *schedules]))
        return optimizers, schedules

    def watch_keep(features, batch_size):
        taken.append(weakref.ref(features))
        keep(features, batch_size)

    def watch_evaluate(*args, **kwargs):
        assert taken
        assert not [ref() for ref in taken if ref() is not None]
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(trainer, "build_optimizers", watch_build)
    monkeypatch.setattr(TargetFeatures, "keep_all", watch_keep)
    monkeypatch.setattr(distillation, "evaluate_drafts", watch_evaluate)
    small = ["tree=chain", "tree.depth=2", "optim.steps=1", "evaluation.batch_sizes=[]"]
    conf = build_conf(
        folder, *small, *overrides, f"output_dir={tmp_path}", without=("draft.ttt_steps", "draft.vocab_size", "optim")
    )
    run_training(conf)


def change_answers(rows: list[dict]) -> list[dict]:
    return [row | {"ids": row["ids"][:8] + row["ids"][8:][::-1]} for row in rows]


def unmark_the_last_token(rows: list[dict]) -> list[dict]:
    return [*rows[:-1], rows[-1] | {"answer": [*rows[-1]["answer"][:-1], False]}]


def cut_the_last_row(rows: list[dict]) -> list[dict]:
    return [*rows[:-1], {key: values[:20] for key, values in rows[-1].items()}]


@pytest.mark.parametrize("change", [change_answers, unmark_the_last_token, cut_the_last_row])
def test_a_run_does_not_continue_on_other_training_rows(folder, tmp_path, target, change):
    rows = read_lines(folder / "rows.jsonl")
    write_lines(tmp_path / "rows.jsonl", rows)
    train_only(configure_resumable(folder, tmp_path, "optim.steps=1"), target)
    report = tmp_path / "run" / "report.json"
    report.touch()
    train_only(configure_resumable(folder, tmp_path, "optim.steps=2"), target)  # the same rows
    assert not report.exists()  # it was of the draft of the first step
    write_lines(tmp_path / "rows.jsonl", change(rows))
    report.touch()
    settings = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"^data: must be the training rows that the run was"):
        train_only(configure_resumable(folder, tmp_path, "optim.steps=3"), target)
    assert report.exists()  # nothing has replaced what it is of
    assert (tmp_path / "run" / "config.yaml").read_text() == settings


def test_a_run_does_not_continue_on_other_weights_of_its_target(folder, tmp_path, target):
    """A model may be saved anew in the folder, or under the name, that the run was started with."""
    write_lines(tmp_path / "rows.jsonl", read_lines(folder / "rows.jsonl"))
    train_only(configure_resumable(folder, tmp_path, "optim.steps=1"), target)
    with pytest.raises(UserError, match=r"^target\.path: must have the weights that the run was started with, got"):
        train_only(configure_resumable(folder, tmp_path, "optim.steps=2"), tiny_target(seed=5))


def test_a_run_does_not_continue_on_another_base_of_its_adapters(folder, tmp_path, target):
    """States have the adapters alone."""
    rows, base = tmp_path / "rows.jsonl", tmp_path / "base"
    write_lines(rows, read_lines(folder / "rows.jsonl"))
    shutil.copytree(folder / "target", base)
    lora = "draft=qwen3-1.7b", f"draft.path={base}", "draft.lora.rank=2"

    def configure(steps: int) -> TrainConf:
        others = ("draft.ttt_steps", "draft.vocab_size")
        return configure_resumable(folder, tmp_path, *lora, f"optim.steps={steps}", without=others)

    train_only(configure(1), target)
    tiny_target(seed=5).model.save_pretrained(base)
    with pytest.raises(UserError, match=r"^draft\.path: must have the weights that the run was started with, got"):
        train_only(configure(2), target)


def configure_resumable(folder: Path, run_dir: Path, *overrides: str, without: tuple[str, ...] = ()) -> TrainConf:
    return build_conf(
        folder,
        f"data.path={run_dir / 'rows.jsonl'}",
        f"output_dir={run_dir}",
        *"held_out.report=0 optim.schedule=constant interval.eval=1 interval.save=1 tree=chain tree.depth=2".split(),
        *overrides,
        without=without,
    )


def train_only(conf: TrainConf, target: Target) -> dict[str, torch.Tensor]:
    """Train without a report; return the draft of the checkpoint."""
    parallel = build_parallel(ParallelConf(), CPU, trackers=[])
    state = open_run(conf, parallel)
    distillation.train_draft(conf, parallel, state, target)
    return load_heads(state.folder)


def test_runs_that_write_the_same_answers_do_not_share_an_unfinished_file(folder, tmp_path, target):
    answered = build_conf(folder, f"output_dir={tmp_path}", "data.demo.max_new_tokens=4")
    parallel = build_parallel(ParallelConf(), CPU, trackers=[])
    answers = _answer_with_target(answered, target, parallel, [[5, 6], [7]])
    (file,) = (tmp_path / "answers").iterdir()
    file.unlink()
    unfinished = file.with_name(f"{file.name}.partial")
    unfinished.write_text("of another run")
    assert _answer_with_target(answered, target, parallel, [[5, 6], [7]]) == answers
    assert unfinished.read_text() == "of another run"
    assert sorted((tmp_path / "answers").iterdir()) == [file, unfinished]


def load_heads(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def test_a_run_with_a_tuned_tree_measures_it_beside_the_other_modes(folder, capsys, monkeypatch):
    monkeypatch.setattr(cost_model, "TIMED_TURNS", 1)
    monkeypatch.setattr(cost_model, "MAX_EXTRA_TIMINGS", 1)
    monkeypatch.setattr(report_tuning, "NODE_BUDGETS", [4])
    tuned = ["tune=true", "tree.depth=2", "tree.nodes=4", "run_name=tuned", "optim.steps=1"]
    run_training(build_conf(folder, *tuned, "evaluation.batch_sizes=[]", "evaluation.prompts_per_category=1"))
    out = capsys.readouterr().out
    # two prompts chose the checkpoint, and the report uses the first of them
    assert "tune: timing trees on 1 of the prompts that the report does not use" in out
    report = json.loads((folder / "out" / "tuned" / "report.json").read_text())
    (draft,), mode = report["drafts"], report["overall"]["modes"]["tuned/tuned"]
    assert f"tune: {draft['name']}: " in out
    assert draft["tuned_tree"] in out
    assert mode["verdict"]["lossless"] == "yes"
    assert mode["figures"]["speedup"]["mean"] > 0


def test_a_missing_compiler_is_reported_and_the_run_goes_on(folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))  # no compiler there
    opening.can_compile.cache_clear()
    try:
        overrides = ["run_name=uncompiled", "optim.steps=1", "draft.norm_output=true"]
        run_training(build_conf(folder, "device.compile=true", *overrides))
    finally:
        opening.can_compile.cache_clear()
    output = capsys.readouterr().out
    assert "no C++ compiler found: compiled parts run eagerly" in output
    assert "draft.norm_output: vLLM reads it, vLLM Neuron does not" in output
    report = json.loads((folder / "out" / "uncompiled" / "report.json").read_text())
    assert report["setup"]["device"]["compiled"] is False


def test_quick_evaluation_separates_a_trained_draft_from_an_untrained_draft(target, learned):
    draft, texts = learned
    prompts = [text[:4] for text in texts]
    measured = build_quick_eval(target, prompts, tree(), EvaluationConf(max_new_tokens=20), batch=4)
    good, bad = measured(draft), measured(new_draft(target))
    assert good["acceptance_length"] > 3 > bad["acceptance_length"]
    shares = [good[f"accepted_{depth}"] for depth in range(1, 5)]
    assert shares == sorted(shares, reverse=True)
    assert good["acceptance_length"] == pytest.approx(1 + sum(shares))
    assert good["delivered_per_round"] <= good["acceptance_length"]
    assert good["teacher_forced_tau"] > 3 > bad["teacher_forced_tau"]


def test_prompts_decoded_a_few_at_a_time_give_the_same_figures(target, learned):
    draft, texts = learned
    prompts = [text[:4] for text in texts]
    conf = EvaluationConf(max_new_tokens=20)
    alone, together = (build_quick_eval(target, prompts, tree(), conf, batch=n)(draft) for n in (1, len(prompts)))
    assert alone == pytest.approx(together)


def test_acceptance_of_a_chain_is_near_its_teacher_forced_estimate(target, learned):
    draft, texts = learned
    prompts = [text[:4] for text in texts]
    conf = EvaluationConf(max_new_tokens=20)
    figures = build_quick_eval(target, prompts, chain(draft.trained_depth), conf, batch=4)(draft)
    assert figures["teacher_forced_tau"] == pytest.approx(figures["acceptance_length"], abs=0.3)


def test_tokens_accepted_beyond_the_limit_are_not_delivered(target, learned):
    """The limit is two tokens: the first is the prefill's, the second comes from a round that accepts more."""
    draft, texts = learned
    prompts = [text[:4] for text in texts]
    measured = build_quick_eval(target, prompts, tree(), EvaluationConf(max_new_tokens=2), batch=4)(draft)
    assert measured["acceptance_length"] > 2
    assert measured["delivered_per_round"] == 1
