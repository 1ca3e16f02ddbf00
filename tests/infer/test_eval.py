"""`python -m infer.eval` measures five modes on held-out prompts, of one draft or several."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from data.eval_prompts.prompts import load_eval_prompts
from infer.config import OWN_TARGET, EvaluationConf
from infer.engine import steps
from infer.engine.decode import Decoder
from infer.eval import main
from infer.inputs.checkpoint_paths import (
    find_newest_run,
    find_tracked_run,
    list_finished_checkpoints,
    open_checkpoints,
    resolve_target,
    run_names,
)
from infer.inputs.command_inputs import load_draft_under_test
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.evaluate import evaluate_drafts, plan_evaluation
from infer.report.prose import list_absences
from infer.report.tables import render_markdown, summary_table
from infer.results.schema import AdaptedTarget, DraftMemory
from infer.verify.config import Verification
from models.checkpoints import checkpoint, checkpoint_files
from models.drafts.ngram import NgramDraft
from models.drafts.options import Medusa2Conf
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.io.tracking import TrackedRun
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import new_draft, tiny_target
from tests.support.reports.sample_reports import as_json, from_json
from tests.support.reports.wandb_files import logged, run_ids

TREE = TreeConf(depth=3, nodes=6, beam_width=2, children=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, learned):
    """Return a folder with two finished runs, their target, and prompts in two categories."""
    folder = tmp_path_factory.mktemp("eval")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    draft, texts = learned
    for name in ("older", "newer"):
        draft.save(folder / "outputs" / "train" / name / "checkpoint", target)
        (folder / "outputs" / "train" / name / "report.json").write_text("{}")
    rows = [
        {"id": i, "category": "ab"[i % 2], "text": " ".join(map(str, text[:5]))} for i, text in enumerate(texts[:4])
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def build_conf(folder, **more):
    few = {"max_new_tokens": 8, "prompts_per_category": 1, "batch_sizes": []}
    return EvaluationConf(**{"prompts": str(folder / "prompts.jsonl")} | few | more)


def test_five_modes_are_judged_and_the_untrained_draft_is_rebuilt(target, folder):
    runs = folder / "outputs" / "train"
    drafts = [load_draft_under_test(runs / name / "checkpoint", target) for name in ("older", "newer")]
    report = evaluate_drafts(target, drafts, tree=TREE, conf=build_conf(folder, prompts_per_category=None))
    assert [draft.name for draft in report.drafts] == ["older", "newer"]
    modes = report.overall.modes
    names = ("untrained", "chain", "tree")
    drafted = [f"{draft}/{name}" for draft in ("older", "newer") for name in names]
    assert list(modes) == ["autoregressive", "ngram", *drafted]
    for draft in report.drafts:
        assert draft.method == "eagle3"
        assert draft.not_measured == {}
        gain = modes[f"{draft.name}/tree"].gains["untrained"]["acceptance_length"]
        assert gain.mean > 0  # it has learned these texts
    for mode in modes.values():
        assert mode.verdict.lossless == "yes"
        assert (mode.verdict.mismatched_prompts, mode.verdict.divergences) == (0, [])
        assert mode.figures.prompts == 4
    assert report.setup.graphs_after_warmup is None  # nothing is compiled here
    assert modes["autoregressive"].figures.acceptance_length.mean == 1.0
    assert report.setup.prompts.by_category == {"a": 2, "b": 2}
    assert set(report.categories) == {"a", "b"}
    assert as_json(from_json(as_json(report))) == as_json(report)


def test_without_phases_only_whole_rounds_are_measured_and_compiled(target, folder):
    """Each part of a round would be a graph of its own, which takes long to compile."""
    draft = load_draft_under_test(folder / "outputs/train/newer/checkpoint", target)
    quick = build_conf(folder, phases=False, batch_sizes=[2])
    report = evaluate_drafts(target, [draft], tree=TREE, conf=quick)
    tree = report.overall.modes["newer/tree"]
    assert tree.split_ms is tree.figures.predicted_speedup is None
    assert tree.figures.speedup.mean > 0
    assert report.drafts[0].batches[0].verdict.lossless == "yes"
    assert "evaluation.phases=true" in " ".join(list_absences(report))
    *_, graphs = plan_evaluation(target, [draft], TREE.build(), quick)
    assert {graph.function.partition(":")[0] for graph in graphs} == {"prefill", "begin", "fused"}


def test_a_draft_of_unknown_seed_has_no_untrained_mode_and_says_why(target, folder, tmp_path):
    saved = tmp_path / "published"
    shutil.copytree(folder / "outputs" / "train" / "newer" / "checkpoint", saved)
    metadata = checkpoint_files.read_metadata(saved)
    del metadata["seed"]
    draft = new_draft(target)
    config = checkpoint_files.read_config(saved)
    checkpoint.save_checkpoint(saved, draft.checkpoint_tensors(), config=config, metadata=metadata)
    report = evaluate_drafts(target, [load_draft_under_test(saved, target)], tree=TREE, conf=build_conf(folder))
    (draft,) = report.drafts
    assert draft.name == "published"
    assert "published/untrained" not in report.overall.modes
    assert draft.not_measured == {"untrained": "the checkpoint does not record its seed"}
    assert set(report.overall.modes["published/tree"].gains) == {"ngram"}


def test_a_deep_tree_is_warned_of(target, folder, caplog):
    deep = TreeConf(depth=6, nodes=8, beam_width=2, children=3)
    draft = load_draft_under_test(folder / "outputs" / "train" / "newer" / "checkpoint", target)
    evaluate_drafts(target, [draft], tree=deep, conf=build_conf(folder, max_new_tokens=2))
    assert "tree.depth: 6 is deeper than the 4 steps that newer was trained for" in caplog.text


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Return a function that runs `python -m infer.eval` in the folder of the runs and returns its output."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> str:
        settings = (
            "target.name=target evaluation.prompts=prompts.jsonl evaluation.prompts_per_category=1 "
            "evaluation.max_new_tokens=4 device.compile=false device.threads=1 tree.depth=2 "
            "evaluation.batch_sizes=[2]"
        ).split()
        monkeypatch.setattr(sys, "argv", ["infer.eval", *settings, *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_a_bare_call_measures_the_newest_run_and_names_it(folder, command):
    out = command()
    assert out.startswith("checkpoint: outputs/train/newer/checkpoint")
    files = {path.name for path in (folder / "outputs" / "infer.eval" / "eval").iterdir()}
    assert files == {"lock", "report.json", "report.md", "report.html", "rounds.jsonl"}
    assert "lossless" in out


def test_results_go_to_the_wandb_run_that_trained_the_draft(folder, command):
    """Several drafts, or a training that goes on, have no such run."""
    train = folder / "outputs" / "train"
    for name in ("older", "newer"):
        state = train / name / "state" / "00000010"
        state.mkdir(parents=True)
        saved = {"progress": {"tracker": name}, "config": {"log.project": "p"}}
        (state / "progress.json").write_text(json.dumps(saved))
    newer = train / "newer"
    (newer / "state" / "00000020.partial").mkdir()
    command("log=wandb-offline", "tree=chain", "evaluation.phases=false", "run_name=tracked")
    out = folder / "outputs" / "infer.eval" / "tracked"
    assert run_ids(out) == [("newer", "p", "")]
    (values,) = logged(out)
    report = json.loads((out / "report.json").read_text())
    tree = report["overall"]["modes"]["newer/tree"]["figures"]
    assert values["eval_report/tree/acceptance_length"] == tree["acceptance_length"]["mean"]
    assert values["eval_report/tree/lossless"] == "yes"
    assert values["eval_report/table/nrows"] == len(summary_table(from_json(report)).rows)
    both = [train / name / "checkpoint" for name in ("older", "newer")]
    assert find_tracked_run(both) is None
    assert find_tracked_run(both[:1]) == TrackedRun(id="older", project="p", entity=None)
    (train / "older" / "report.json").rename(train / "older" / "moved.json")
    assert find_tracked_run(both[:1]) is None
    (train / "older" / "moved.json").rename(train / "older" / "report.json")
    shutil.rmtree(newer / "state")
    assert find_tracked_run(both[1:]) is None


def test_names_of_runs_are_short_and_no_two_alike(tmp_path):
    def name_runs(*paths: str) -> list[str]:
        return run_names([tmp_path / path for path in paths])

    assert name_runs("a/demo", "b/demo", "b/other/checkpoint") == ["a/demo", "b/demo", "other"]
    assert name_runs("a/x/demo", "a/y/demo", "b/y/demo") == ["a/x/demo", "a/y/demo", "b/y/demo"]
    assert name_runs("a/x/demo", "a/y/demo") == ["x/demo", "y/demo"]
    assert name_runs("a/runs/demo/checkpoint", "b/runs/demo") == ["a/runs/demo", "b/runs/demo"]
    assert name_runs("demo", "demo/demo") == ["demo", "demo/demo"]
    assert name_runs("demo", "runs/demo") == ["demo", "runs/demo"]
    assert name_runs("demo/../demo/state/..") == ["demo"]


def test_a_run_given_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="checkpoint: no run may be given twice, got demo/ch"):
        run_names([Path("demo/checkpoint"), tmp_path / "other", tmp_path / "demo"])


def test_drafts_of_two_targets_are_refused_before_either_is_loaded(folder, tmp_path):
    ours = folder / "outputs" / "train" / "newer" / "checkpoint"
    shutil.copytree(ours, theirs := tmp_path / "theirs")
    metadata = checkpoint_files.read_metadata(ours) | {checkpoint_files.TARGET_HASH_KEY: "f" * 64}
    tensors = safetensors.torch.load_file(ours / checkpoint_files.WEIGHTS_FILE)
    checkpoint.save_checkpoint(theirs, tensors, config=checkpoint_files.read_config(ours), metadata=metadata)
    with pytest.raises(UserError, match=r"must be of one target, got .*newer.* of \w+, .*theirs of"):
        open_checkpoints([str(ours), str(theirs)])


def test_each_draft_gets_its_own_layers(target, folder, learned):
    """Beside others a draft proposes the same tokens as alone, and so does a draft that needs no layers."""
    other = new_draft(target, layers=[0, 1, 2])
    candidates = [
        DraftUnderTest(name="other layers", draft=other, untrained="not asked for"),
        DraftUnderTest(name="learned", draft=learned[0], untrained="not asked for"),
        DraftUnderTest(name="no layers", draft=NgramDraft(), untrained="there is none"),
    ]
    few = build_conf(folder, max_new_tokens=8)
    together = count_accepted(evaluate_drafts(target, candidates, tree=TREE, conf=few))
    by_itself = count_accepted(evaluate_drafts(target, [candidates[1]], tree=TREE, conf=few))
    assert by_itself.items() <= together.items()
    assert sum(together["learned/tree"]) > sum(together["other layers/tree"])
    assert together["no layers/chain"] == together["ngram"]


def test_a_tree_too_deep_for_one_of_several_drafts_names_it(target, folder):
    candidates = [
        DraftUnderTest(name=f"up to {depth}", draft=new_draft(target, max_depth=depth), untrained="no")
        for depth in (4, 2)
    ]
    with pytest.raises(UserError, match=r"tree\.depth: .* at most the 2 tokens that up to 2 can"):
        evaluate_drafts(target, candidates, tree=TREE, conf=build_conf(folder))


def test_memory_of_a_draft_counts_its_weights_and_its_state(target, folder):
    directory = folder / "outputs" / "train" / "newer" / "checkpoint"
    copying = DraftUnderTest(name="copy", draft=NgramDraft(), untrained="there is none")
    candidates = [load_draft_under_test(directory, target), copying]
    report = evaluate_drafts(target, candidates, tree=TREE, conf=build_conf(folder, max_new_tokens=2))
    trained, copied = (draft.memory_bytes for draft in report.drafts)
    stored = safetensors.torch.load_file(directory / checkpoint_files.WEIGHTS_FILE)
    del stored["embed_tokens.weight"]  # the target's
    # Beside the stored weights there are maps between vocabularies and rotation angles.
    assert 0 <= trained.weights - sum(t.nbytes for t in stored.values()) < 1000
    slots = 64  # a prompt of 5, an answer of 2 and a round of at least 32, rounded up
    assert copied == DraftMemory(weights=0, state=8 * (slots + 1))  # known ids, and how many they are


@pytest.fixture(scope="module")
def adapted(target):
    """Return a target that answers some prompts otherwise."""
    adapted = tiny_target(seed=0)
    with torch.no_grad():
        adapted.head.weight += 0.1 * torch.randn(adapted.head.weight.shape)
    adapted.name = "tiny adapted"
    return adapted


def test_a_draft_with_a_target_of_its_own_is_compared_with_that_target(target, adapted, folder, learned):
    usual = DraftUnderTest(name="usual", draft=learned[0], untrained="not asked for")
    own = DraftUnderTest(name="own", draft=learned[0], untrained="not asked for", adapted_target=adapted)
    all_prompts = build_conf(folder, prompts_per_category=None)
    report = evaluate_drafts(target, [usual, own], tree=TREE, conf=all_prompts)
    answers = [answer_prompts(model, folder) for model in (target, adapted)]
    changed = sum(ours != theirs for ours, theirs in zip(*answers, strict=True))
    assert changed > 0
    first, second = report.drafts
    assert first.target is None
    assert second.target == AdaptedTarget(
        name="tiny adapted", parameters=target.num_parameters, changed_answers=changed
    )
    modes = report.overall.modes  # each compared with the target that verified it
    assert {mode.verdict.lossless for mode in modes.values()} == {"yes"}
    assert modes["own/autoregressive"].figures.speedup.mean == 1
    lengths = [row.modes["own/autoregressive"].tokens for row in report.per_prompt]
    assert lengths == [len(ids) for ids in answers[1]]


def test_batches_are_judged_by_the_answers_of_one_row(target, folder, learned, monkeypatch):
    """The planted fault reads each row through the tree of the first, so that a row alone is right."""
    honest = steps.tree_mask
    draft = DraftUnderTest(name="learned", draft=learned[0], untrained="not asked for")
    many = build_conf(folder, prompts_per_category=None, batch_sizes=[4], max_new_tokens=12, phases=False)
    monkeypatch.setattr(
        steps, "tree_mask", lambda lengths, sees, slots: honest(lengths, sees[:1].expand_as(sees), slots)
    )
    report = evaluate_drafts(target, [draft], tree=TREE, conf=many)
    (batch,) = report.drafts[0].batches
    assert report.overall.modes["learned/tree"].verdict.lossless == "yes"
    assert batch.verdict.lossless == "no"


def test_answers_that_all_end_at_once_have_a_report_without_figures(folder, learned):
    target = tiny_target(seed=0)
    target.model.generation_config.eos_token_id = list(range(target.vocab_size))
    draft = DraftUnderTest(name="learned", draft=learned[0], untrained="not asked for")
    report = evaluate_drafts(target, [draft], tree=TREE, conf=build_conf(folder, batch_sizes=[2], phases=False))
    (batch,) = report.drafts[0].batches
    assert batch.speedup is batch.tokens_per_s is batch.acceptance_length is None
    assert from_json(as_json(report)).drafts == report.drafts
    assert "| 2 | - |" in render_markdown(report)


def answer_prompts(target, folder):
    """Return the target's own answers to the prompts."""
    prompts = load_eval_prompts(target.tokenizer, str(folder / "prompts.jsonl"), limit=None)
    decoder = Decoder(target, sampling=SamplingConf(), slots=32)
    return [
        decoder.decode([p.ids], row_ids=[p.row_id], max_new_tokens=8, eos_ids=target.eos_ids)[0].ids for p in prompts
    ]


def test_a_checkpoint_loads_its_adapted_target(target, tmp_path):
    draft = build_draft(Medusa2Conf(heads=2), target, loss=LossConf(), seed=0)
    draft.save(tmp_path / "run" / "checkpoint", target)
    loaded = load_draft_under_test(tmp_path / "run" / "checkpoint", target)
    adapted = loaded.adapted_target
    assert adapted is not None
    assert adapted is not target


def test_typical_verification_marks_only_the_modes_of_drafts_lossy(target, folder, learned):
    draft = DraftUnderTest(name="learned", draft=learned[0], untrained="not asked for")
    lossy = build_conf(
        folder,
        prompts_per_category=None,
        verification=Verification.typical,
        typical_epsilon=0.001,
        typical_delta=0.001,
        sampling=SamplingConf(temperature=1.0),
    )
    report = evaluate_drafts(target, [draft], tree=TREE, conf=lossy)
    modes = {key: mode.verdict for key, mode in report.overall.modes.items()}
    for key in ("learned/chain", "learned/tree"):
        assert (modes[key].verification, modes[key].lossless) == ("typical", "no")
    assert modes["learned/tree"].mismatched_prompts > 0  # almost anything passes
    for key in ("autoregressive", "ngram"):
        assert (modes[key].verification, modes[key].lossless) == ("coupled", "yes")


def count_accepted(report):
    """Return the accepted tokens of every prompt, by mode."""
    by_mode = {}
    for row in report.per_prompt:
        for mode, figures in row.modes.items():
            by_mode.setdefault(mode, []).append(figures.accepted)
    return {mode: tuple(counts) for mode, counts in by_mode.items()}


def test_a_draft_is_verified_by_the_revision_that_it_was_trained_for(tmp_path):
    target = tiny_target(seed=0)
    target.revision = "abc123"
    new_draft(target).save(tmp_path, target)
    own = TargetConf(name=OWN_TARGET)
    assert resolve_target(own, [tmp_path]) == TargetConf(name=target.name, revision="abc123")
    assert resolve_target(replace(own, revision="main"), [tmp_path]).revision == "main"
    assert resolve_target(TargetConf(name="other"), [tmp_path]).revision is None


def test_a_draft_that_names_no_target_is_not_taken_for_one_of_the_demo(tmp_path):
    (tmp_path / "model.safetensors.index.json").touch()  # in several files, as large drafts are
    own = TargetConf(name=OWN_TARGET)
    with pytest.raises(UserError, match=r"^target: must be given for a draft that records none, got null for "):
        resolve_target(own, [tmp_path])
    assert resolve_target(replace(own, path="folder"), [tmp_path]).location == "folder"


def test_the_newest_run_may_have_a_name_with_folders_and_is_no_part_of_another(tmp_path):
    for age, run in enumerate(["sweep/lr=0.1", "single", "single/replaced", "single/first_stage"]):
        (tmp_path / run / "checkpoint").mkdir(parents=True)
        (tmp_path / run / "report.json").write_text("{}")
        os.utime(tmp_path / run / "report.json", (1e9, 1e9 - age if run == "single" else 1e9 + age))
    newest = [tmp_path / run / "checkpoint" for run in ("sweep/lr=0.1", "single")]
    assert (list_finished_checkpoints(tmp_path), find_newest_run(tmp_path)) == (newest, newest[0])


def test_the_newest_run_may_lie_on_another_disk_and_a_damaged_one_is_passed_over(tmp_path):
    runs = tmp_path / "train"
    (tmp_path / "disk" / "checkpoint").mkdir(parents=True)
    (tmp_path / "disk" / "report.json").write_text("{}")
    (runs / "torn" / "checkpoint").mkdir(parents=True)
    (runs / "torn" / "state" / "3").mkdir(parents=True)
    (runs / "torn" / "state" / "3" / "progress.json").write_text("{")
    (runs / "linked").symlink_to(tmp_path / "disk")
    assert list_finished_checkpoints(runs) == [runs / "linked" / "checkpoint"]


def test_without_a_finished_run_the_error_names_the_command_for_training(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint: no finished run under .*; run `python -m"):
        find_newest_run(tmp_path)
