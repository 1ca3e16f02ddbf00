"""A run from a feature store needs none of the target's layers, and learns what it learns with them."""

import json
import logging
import shutil
from dataclasses import replace

import pytest

from conf.entry import compose
from data.config import Dtype
from data.features.manifest import read_manifest
from infer.inputs.checkpoint_paths import find_last_file, list_finished_checkpoints
from models.checkpoints.saved_states import PROGRESS_FILE, find_newest_state, read_progress_file
from models.drafts.options import CausalLMConf, InitFrom
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.targets.loading import load_target, load_target_tables
from tests.support.data import captured
from tests.support.models.tiny import CPU
from tests.support.reports.planned import GENEROUS
from tests.support.runs.stored_run import BF16, EAGLE3, METHODS, learned, training
from tests.support.runs.toy_run import metrics
from train.checks import build_run_parallel
from train.config.run import ParallelConf, TrainPlanConf
from train.distillation import distill_draft
from train.planning.choice import plan_run
from train.planning.device_fit import FittedRun
from train.planning.remedies import suggest_overrides
from train.quick_eval import build_stored_eval
from train.rows.packed_rows import load_training_rows
from train.rows.stored_target import build_run_target


@pytest.mark.parametrize("method", ["eagle3", "eagle1", "medusa", "hydra"])
def test_a_run_without_layers_ends_in_a_checkpoint_and_says_what_it_did_not_measure(folder, method, caplog):
    capture = captured.conf(folder, draft=METHODS[method], precision=BF16, dtype=Dtype.bf16, run_name=method)
    conf = training(folder, METHODS[method], name=method, store=captured.captured(capture))
    conf = replace(conf, measure=False)
    with caplog.at_level(logging.INFO):
        distill_draft(FittedRun(conf=conf, parallel=build_run_parallel(conf, trackers=[]), planned_bytes=None))
    run_folder = folder / "train" / method
    assert "measure=false: nothing was decoded, so tokens per round, speed and whether" in caplog.text
    assert f"python -m infer.eval checkpoint={run_folder / 'checkpoint'}" in caplog.text
    assert not (run_folder / "report.html").exists()
    agreement = [line["eval/teacher_forced_tau"] for line in metrics(run_folder) if "eval/teacher_forced_tau" in line]
    assert len(agreement) == 2
    assert read_progress_file(find_newest_state(run_folder))["progress"]["best"] == max(agreement)
    load_draft(run_folder / "checkpoint", load_target(conf.target, CPU))
    assert run_folder / "checkpoint" in list_finished_checkpoints(folder / "train")


def test_a_run_that_goes_on_is_not_finished(folder, store):
    learned(replace(training(folder, EAGLE3, name="goes on", store=store), measure=False))
    run_folder = folder / "train" / "goes on"
    newest = find_newest_state(run_folder)
    assert find_last_file(run_folder) == newest
    saved = read_progress_file(newest)
    saved["progress"]["steps"] += 1
    (newest / PROGRESS_FILE).write_text(json.dumps(saved))
    assert find_last_file(run_folder) is None


def test_a_language_model_is_chosen_by_its_share_of_right_tokens(folder):
    draft = CausalLMConf(name="tiny", path=str(folder / "target"))
    capture = captured.conf(folder, draft=draft, precision=BF16, dtype=Dtype.bf16, run_name="draft model")
    conf = replace(training(folder, draft, name="model", store=captured.captured(capture)), measure=False)
    distill_draft(FittedRun(conf=conf, parallel=build_run_parallel(conf, trackers=[]), planned_bytes=None))
    shares = [line["eval/hit"] for line in metrics(folder / "train" / "model") if "eval/hit" in line]
    best = read_progress_file(find_newest_state(folder / "train" / "model"))["progress"]["best"]
    assert max(shares) == best > 0.3  # the draft began as the target itself; a guess is right in 1 of 61


def test_a_checkpoint_is_chosen_by_the_tokens_that_decoding_drafts_whatever_is_learned(folder):
    capture = captured.conf(folder, draft=EAGLE3, precision=BF16, dtype=Dtype.bf16, run_name="prompts", on_prompts=True)
    conf = training(folder, EAGLE3, name="prompts", store=captured.captured(capture))
    target, parallel, figures = load_target(conf.target, CPU), build_run_parallel(conf, trackers=[]), []
    for on_prompts in (False, True):
        run = replace(conf, loss=replace(conf.loss, on_prompts=on_prompts))
        draft = build_draft(run.draft, target, loss=run.loss, seed=0)
        data = load_training_rows(run, target, draft, parallel)
        figures.append(build_stored_eval(target, data.selection, data.store)(draft))
    assert figures[0] == figures[1]


def test_no_layer_is_loaded(folder, store):
    conf = training(folder, EAGLE3, name="tables", store=store)
    tables = load_target_tables(conf.target, CPU, fingerprint=read_manifest(store).target_sha256)
    whole = load_target(conf.target, CPU)
    assert {name for name, _ in tables.model.named_parameters()} == {
        name for name, _ in whole.model.named_parameters() if ".layers." not in name
    }
    assert (tables.num_layers, tables.hidden_size, tables.eos_ids) == (
        whole.num_layers,
        whole.hidden_size,
        whole.eos_ids,
    )
    assert tables.tokenizer_fingerprint == whole.tokenizer_fingerprint


def test_a_store_of_another_head_is_refused(folder, store, tmp_path):
    conf = replace(training(folder, EAGLE3, name="other", store=store), measure=False)
    parallel = build_run_parallel(conf, trackers=[])
    for recorded, line in (("of another", "whose embeddings and head are others"), ("", "does not record their hash")):
        copy = shutil.copytree(store, tmp_path / (recorded or "older"))
        replace(read_manifest(store), tables_sha256=recorded).write(copy)
        with pytest.raises(UserError, match=rf"^data\.path: must be a store of this target, got .*{line}"):
            build_run_target(replace(conf, data=replace(conf.data, path=str(copy))), parallel)


def test_settings_that_need_the_layers_are_refused(folder, store):
    conf = replace(training(folder, EAGLE3, name="refused", store=store), measure=False)
    live = training(folder, EAGLE3, name="refused")
    pruned = CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5])
    for wrong, line in (
        (replace(live, measure=False), r"^measure: must be true for data\.source=jsonl, got false; capture"),
        (replace(conf, parallel=ParallelConf(tensor=2)), r"^parallel: must leave the target whole with measure=false"),
        (replace(conf, draft=pruned), r"^measure: must be true for a draft that is cut from its target or adapts"),
    ):
        with pytest.raises(UserError, match=line):
            wrong.check_settings()
    conf.check_settings()


def test_a_store_of_another_name_is_told(folder, store, tmp_path, caplog):
    moved = shutil.copytree(folder / "target", tmp_path / "moved")
    conf = replace(training(folder, EAGLE3, name="moved", store=store), measure=False)
    parallel = build_run_parallel(conf, trackers=[])
    build_run_target(conf, parallel)
    assert "is not checked" not in caplog.text
    build_run_target(replace(conf, target=replace(conf.target, path=str(moved))), parallel)
    assert f"the store is of {folder / 'target'}; whether {moved} has the same layers is not checked" in caplog.text


@pytest.mark.no_shapes
def test_a_target_that_fits_nowhere_is_planned_as_a_store(folder):
    small = ["optim.rows_per_step=1", "loss.logits_chunk=8"]
    words = [*small, f"target.path={folder / 'target'}", "draft=demo-medusa", "optim=adamw", "data.row_length=64"]
    conf = compose("train_plan", TrainPlanConf, [*words, "held_out.batch=1"])
    stored = compose("train_plan", TrainPlanConf, [*words, "data=captured", "measure=false"])
    single = replace(GENEROUS, chips=1, cores=1)
    peaks = [plan_run(replace(each, machine=single)).best.peak_bytes for each in (conf, stored)]
    assert peaks[1] < peaks[0]
    tight = replace(single, memory_gib=sum(peaks) / 2 / 0.9 / 2**30)
    plan = plan_run(replace(conf, machine=tight))
    assert not plan.fits(plan.best)
    changes = suggest_overrides(plan)
    assert changes == ["data=captured", "measure=false", "data.keep_features=false"]
    rows = ["data=jsonl", "data.path=a.jsonl", "data.turns=last", "data.column=conv", "data.split='train[9:]'"]
    conf = compose("train_plan", TrainPlanConf, [*words, "held_out.batch=1", *rows])
    changes = suggest_overrides(plan_run(replace(conf, machine=tight)))
    assert {"data.turns=auto", "data.column=null", "data.split=train"} <= set(changes)
    compose("train_plan", TrainPlanConf, [*words, "held_out.batch=1", *rows, *changes, "data.path=null"])
