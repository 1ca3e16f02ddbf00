"""`python -m infer.tune` chooses among all its candidates and leaves its choice as a file."""

import json
import logging
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.entry import compose
from infer.commands.tree_tuning import tune_checkpoints
from infer.config import EvalConf
from infer.engine.decode import Decoder
from infer.measure.acceptance import best_first_paths
from infer.measure.replay import collect_replay_texts
from infer.results.intervals import Estimate
from infer.tune import main
from infer.tuning import cost_model
from infer.tuning.candidates import USER_TREE, find_neighbors
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostCurve, select_probes
from infer.tuning.results import DraftTuning, ExpectedTokens, TuningResult, TuningVerdict, write_choices
from infer.tuning.search import estimate_expected_tokens
from models.drafts.ngram import NgramDraft
from models.io.errors import UserError
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import tree_from_paths
from models.trees.tree_formats import read_fields
from tests.support.models.tiny import new_draft
from tests.support.reports.tuning import TABLE, considered, costs, prompts_of
from tests.support.reports.wandb_files import logged, run_ids

KINDS = ("static", "dynamic", "product")


def test_every_window_and_every_budget_is_a_candidate_with_and_without_copies():
    candidates = {candidate.name: candidate for candidate in considered()}
    assert len(candidates) == len(considered())
    assert {f"chain-{window}" for window in range(1, 7)} <= set(candidates)
    for family in KINDS:
        assert [candidate.size for candidate in candidates.values() if candidate.family == family] == [4, 8, 16, 32]
    assert [candidate.size for candidate in candidates.values() if candidate.family == "static-d2"] == [4, 8, 16]
    assert all(candidate.tree.depth == 2 for candidate in candidates.values() if candidate.family.endswith("-d2"))
    for name, candidate in candidates.items():
        if not candidate.conf.ngram_tokens:
            assert candidates[f"{name}+4"].tree.size == candidate.tree.size + 4
    assert candidates[USER_TREE].tree.nodes == 4


def test_lookup_alone_has_its_windows_and_is_timed_at_each():
    candidates = considered(lookup=(4, 8, 16))
    lookups = [candidate for candidate in candidates if candidate.is_lookup]
    assert [candidate.name for candidate in lookups] == ["ngram-4", "ngram-8", "ngram-16"]
    assert set(lookups) <= set(select_probes(candidates))
    assert find_neighbors(lookups[0], candidates) == lookups[1:2]
    assert not considered(lookup=())[-1].is_lookup


def test_the_file_of_every_candidate_decodes_with_its_tree(tmp_path):
    file = tmp_path / "tree.json"
    for candidate in considered():
        file.write_text(json.dumps(candidate.to_file()))
        preset = TreeConf(depth=3, nodes=6, ngram_tokens=8, file=str(file))
        assert preset.build() == candidate.tree, candidate.name


@pytest.mark.parametrize(
    "fields", [{"kind": "tall"}, {"kind": "chain", "depth": "2"}, {"kind": "dynamic", "leaves": 3}]
)
def test_a_file_with_other_fields_is_refused(tmp_path, fields):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"tree": fields}))
    with pytest.raises(UserError, match=r"^tree.file: `tree` must hold a kind of chain, static"):
        read_fields(file)


def test_settings_of_the_tuning_go_into_the_command():
    settings = [
        "target.path='/my models/a=b'",
        "sampling.temperature=0.7",
        "sampling.seed=3",
        "prompts='it\\'s mine.jsonl'",
        "device.threads=1",
        "max_new_tokens=32",
        "+template.enable_thinking=false",
    ]
    conf = compose("tune", TuneConf, settings)
    repeated = compose("eval", EvalConf, shlex.split(conf.eval_overrides(4)))
    assert (repeated.target, repeated.device) == (conf.target, conf.device)
    assert repeated.evaluation.sampling == conf.sampling
    assert repeated.evaluation.prompts == conf.prompts == "it's mine.jsonl"
    assert repeated.evaluation.template == conf.template == {"enable_thinking": False}
    assert (repeated.evaluation.max_new_tokens, repeated.evaluation.batch_sizes) == (32, [4])
    # An evaluation has another default.
    assert compose("tune", TuneConf, []).eval_overrides(1) == "evaluation.max_new_tokens=64"


def test_only_an_interval_above_a_speedup_of_1_pays():
    for ci95, verdict in {
        (1.01, 1.3): TuningVerdict.pays,
        (0.9, 1.3): TuningVerdict.open,
        (0.5, 0.9): TuningVerdict.loses,
    }.items():
        assert TuningVerdict.from_speedup(Estimate(mean=1.0, ci95=list(ci95))) is verdict
    assert TuningVerdict.from_speedup(Estimate(mean=3.0, ci95=None)) is TuningVerdict.open
    assert TuningVerdict.from_speedup(None) is TuningVerdict.unmeasured


def test_expected_tokens_of_a_tree_are_those_of_decoding_with_it(target, learned):
    draft, written = learned
    conf = TuneConf(depth=4, ranks=4, ngram_tokens=3, ngram_windows=[2, 6], max_new_tokens=20)
    prompts = prompts_of(written)[:6]
    replay_texts = collect_replay_texts(
        target, prompts, sampling=conf.sampling, max_new_tokens=20, layers=draft.needs.layers, lookahead=6
    )
    candidates = considered(nodes=(4, 8), copied=3, table=TABLE[:4], lookup=(2, 6))
    tokens = estimate_expected_tokens(target, draft, candidates, replay_texts, conf)
    assert set(tokens) == {candidate.name for candidate in candidates}
    shapes = ("chain-2", "chain-4+3", "static-8", "dynamic-8+3", USER_TREE, "ngram-2", "ngram-6")
    for name in shapes:
        (candidate,) = [candidate for candidate in candidates if candidate.name == name]
        decoder = Decoder(
            target,
            NgramDraft() if candidate.is_lookup else draft,
            candidate.tree,
            sampling=SamplingConf(),
            slots=64,
            batch=len(prompts),
        )
        generations = decoder.decode(
            [p.ids for p in prompts], row_ids=[p.row_id for p in prompts], max_new_tokens=20, eos_ids=target.eos_ids
        )
        rounds = sum(len(row.accepted) for row in generations)
        assert tokens[name].delivered == pytest.approx(sum(len(row.ids) - 1 for row in generations) / rounds)
        assert tokens[name].tau == pytest.approx(1 + sum(sum(r.accepted) for r in generations) / rounds)


SMALL = (
    "target.name=target prompts=prompts.jsonl device.threads=1 device.compile=false nodes=[4] depth=2 ranks=3 "
    "max_new_tokens=8 repeats=1 batch=[4] tree=chain tree.depth=2"
).split()


@pytest.fixture
def folder(tmp_path, target, learned, monkeypatch, capsys, caplog):
    """Return a folder to tune in, with a trained draft and an untrained one."""
    caplog.set_level(logging.WARNING)
    monkeypatch.chdir(tmp_path)
    draft, written = learned
    target.model.save_pretrained("target")
    target.tokenizer.save_pretrained("target")
    for name, saved in (("good", draft), ("untrained", new_draft(target))):
        saved.save(Path(f"outputs/train/{name}/checkpoint"), target)
    Path("outputs/train/good/report.json").write_text("{}")
    rows = [{"text": " ".join(map(str, text[:5]))} for text in written]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Return a function that runs `python -m infer.tune` in the folder and returns its output."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["infer.tune", *SMALL, *arguments])
        main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def tune(folder, monkeypatch, capsys):
    """Return a function that tunes with known costs and returns its output and the drafts of tune.json."""
    monkeypatch.setattr(cost_model, "TIMED_TURNS", 1)
    monkeypatch.setattr(cost_model, "MAX_EXTRA_TIMINGS", 1)

    def run(*arguments: str, runs: tuple[str, ...] = ("good",), **known: float) -> tuple[str, list]:
        directories = [Path(f"outputs/train/{name}/checkpoint") for name in runs]
        conf = compose("tune", TuneConf, [*SMALL, *arguments])
        tune_checkpoints(conf, directories, folder, costs(**known))
        saved = json.loads((folder / "tune.json").read_text())
        return capsys.readouterr().out, saved["drafts"]

    return run


def test_the_newest_run_is_tuned_and_its_best_shape_was_timed(command):
    out = command("context=[40]")
    assert out.startswith("checkpoint: outputs/train/good/checkpoint\n")
    saved = json.loads(Path("outputs/infer.tune/tune/tune.json").read_text())
    (draft,) = saved["drafts"]
    (result,) = draft["results"]
    assert (result["batch"], result["context"]) == (4, 40)
    shape = {candidate["name"]: candidate for candidate in result["candidates"]}[result["best"]]
    assert shape["measured_speedup"]["mean"] > 0
    assert shape["cost_timed"]
    assert result["choice"] in (result["best"], None)


def test_without_timing_the_best_static_tree_of_each_budget_is_left(command):
    out = command("timing=false", "nodes=[3,6]", "depth=3")
    folder = Path("outputs/infer.tune/tune")
    (draft,) = json.loads((folder / "tune.json").read_text())["drafts"]
    assert draft["results"] == []
    table, tokens = np.array(draft["acceptance"]), draft["expected_tokens"]
    assert table.shape == (3, 3)
    assert len(draft["rounds"]) == 3
    for nodes in (3, 6):
        file = folder / f"good-static-{nodes}.json"
        (line,) = [line for line in out.splitlines() if f"tree.file={file}" in line]
        conf = compose("eval", EvalConf, shlex.split(line.partition("infer.eval ")[2]))
        assert conf.tree.build() == tree_from_paths(best_first_paths(table, nodes))
        assert json.loads(file.read_text())["tau"] == tokens[f"static-{nodes}"]["tau"]
    assert tokens["static-6"]["tau"] >= tokens["chain-2"]["tau"] > 1.2
    assert "without a draft, the target takes" not in out


def test_the_choices_are_logged(tune, folder):
    """The training of this draft was not tracked, so they get a run of their own."""
    _, (draft,) = tune("context=[40]", "log=wandb-offline", node_s=0.01)
    (result,) = draft["results"]
    ((_, project, name),) = run_ids(folder)
    assert (project, name) == ("drafts", folder.name)
    (values,) = logged(folder)
    assert values["tune_report/good/batch 4, context 40"] == (result["choice"] or "none")
    assert values["tune_report/table/nrows"] == 1
    assert values["tune_report/table/ncols"] == 7


def test_the_choice_is_left_as_a_file_that_says_how_to_decode_with_it(tune, folder):
    out, (draft,) = tune("context=[40]", node_s=0.01)
    (result,) = draft["results"]
    shape = {candidate["name"]: candidate for candidate in result["candidates"]}[result["choice"]]
    choice = json.loads((folder / "good-b4-c40.json").read_text())
    (line,) = [line for line in out.splitlines() if line.startswith("python -m infer.eval ")]
    conf = compose("eval", EvalConf, shlex.split(line)[3:])
    assert (conf.checkpoint, choice["checkpoint"]) == ([draft["checkpoint"]], draft["checkpoint"])
    assert conf.tree.build().size == shape["nodes"]
    assert (conf.target.name, conf.evaluation.prompts) == ("target", "prompts.jsonl")
    assert (conf.evaluation.max_new_tokens, conf.evaluation.batch_sizes) == (8, [4])


def test_a_batch_that_does_not_fit_leaves_the_results_of_the_others(tune, folder, monkeypatch):
    build = cost_model.Decoder

    def build_small(*args, batch, **options):
        if batch == 4:
            raise torch.OutOfMemoryError("no memory for four rows")
        return build(*args, batch=batch, **options)

    monkeypatch.setattr(cost_model, "Decoder", build_small)
    out, (draft,) = tune("context=[40]", "batch=[1,4]", node_s=0.01)
    assert [result["batch"] for result in draft["results"]] == [1]
    assert "batch 4, context 40: not tuned: OutOfMemoryError: no memory for four rows" in out
    with pytest.raises(UserError, match=r"^batch: must leave memory for caches of 40 tokens a row, got \[4\]"):
        tune("context=[40]", node_s=0.01)


def test_a_second_tuning_removes_the_trees_of_its_own_draft_alone(tmp_path):
    files = ["demo-b1-c126.json", "demo-static-8.json", "demo-medusa-b1-c126.json", "demo-medusa-static-8.json"]
    for name in files:
        (tmp_path / name).touch()
    tuning = DraftTuning(
        name="demo", directory=tmp_path, candidates=[], expected_tokens={}, acceptance=TABLE, rounds=[9] * 6
    )
    tuning.remove_trees(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(files[2:])


def test_lookup_alone_is_left_as_the_mode_of_the_report_that_decodes_with_it(tmp_path):
    """Nothing is drafted, so the figures of the draft's modes are not those of the choice."""
    candidates, curve = considered(lookup=(4,)), CostCurve()
    tokens = ExpectedTokens(delivered=2.0, tau=2.0)
    for candidate in candidates:
        curve.add(candidate, 1.5)
    pick = candidates[-1]
    speedups = {pick.name: Estimate(mean=1.3, ci95=[1.2, 1.4])}
    result = TuningResult(
        batch=4,
        context=40,
        candidates=candidates,
        token_s=0.01,
        cost_curve=curve,
        num_prompts=9,
        best=pick,
        speedups=speedups,
        best_over_each=speedups,
    )
    tuning = DraftTuning(
        name="new",
        directory=tmp_path,
        candidates=candidates,
        acceptance=TABLE,
        rounds=[9] * 6,
        expected_tokens={c.name: tokens for c in candidates},
        results=[result],
    )
    (line,) = write_choices([tuning], tmp_path, TuneConf())
    choice = json.loads((tmp_path / "new-b4-c40.json").read_text())
    assert (choice["name"], choice["mode"]) == ("ngram-4", "ngram")
    command, _, note = line.partition("  # ")
    assert note == "its mode ngram, of one row; no draft is needed"
    conf = compose("eval", EvalConf, shlex.split(command)[3:])
    assert conf.tree.build() == pick.tree
    assert conf.evaluation.batch_sizes == EvalConf().evaluation.batch_sizes  # those decode with the draft's tree


def test_a_draft_that_is_never_right_is_not_worth_speculating(tune):
    out, drafts = tune("ngram_tokens=0", "ngram_windows=[]", runs=("good", "untrained"), node_s=0.01, pass_s=0.1)
    assert [draft["name"] for draft in drafts] == ["good", "untrained"]
    (good,), (untrained,) = (draft["results"] for draft in drafts)
    assert good["choice"] is not None
    assert untrained["choice"] is None
    assert out.count("choice: do not speculate") == 1
    assert "infer.eval checkpoint=outputs/train/good" in out
    assert "infer.eval checkpoint=outputs/train/untrained" not in out


REFUSED = {
    "batch=[]": "batch: must list numbers of at least 1, got []; list one, such as [8]",
    "nodes=[0]": "nodes: must list numbers of at least 1, got [0]; list one, such as [8]",
    "depth=0": "depth: must be at least 1, got 0; raise it",
    "ngram_tokens=-1": "ngram_tokens: must not be negative, got -1; 0 copies no tokens",
    "ngram_windows=[4,65]": "ngram_windows: must list numbers in 1..64, got [4, 65]; [] leaves lookup alone out",
    "max_new_tokens=1": "max_new_tokens: must be at least 2, got 1; raise it",
    "ranks=1 depth=4 nodes=[8,16]": "nodes: must list a budget of at most the 4 paths that "
    "depth and ranks give, got [8, 16]; raise depth or ranks",
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_answered_in_one_line(mistake):
    with pytest.raises(UserError) as refused:
        compose("tune", TuneConf, mistake.split())
    assert str(refused.value) == REFUSED[mistake]


BEFORE = {
    "tree.file=none.json": "tree.file: must be a readable JSON file, got none.json",
    "prompts=none.jsonl": "prompts: must be ",
    "checkpoint=none": "checkpoint: ",
}


@pytest.mark.parametrize("mistake", BEFORE)
def test_mistakes_that_need_no_model_are_refused_before_it_is_loaded(command, capsys, mistake):
    with pytest.raises(SystemExit):
        command(*mistake.split(), "target.name=no-such-target")
    assert capsys.readouterr().err.startswith(f"error: {BEFORE[mistake]}")


def test_a_context_that_no_answer_fits_in_is_refused_before_replay(command, capsys):
    with pytest.raises(SystemExit):
        command("context=[40,12]")
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "error: context: must hold prompt and answer, 5 + 8 tokens, got 12; raise it or shorten max_new_tokens"
    )
    assert "replaying" not in captured.out


def test_a_context_beyond_the_targets_positions_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("context=[100000]")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: context: prompt and answer must fit in the ")
    assert line.endswith(" positions of the target, got 100000; lower it or shorten the prompts")


def test_a_small_vocabulary_has_fewer_ranks(tune):
    _, (draft,) = tune("context=[40]", "ranks=100", node_s=0.01)
    assert len(draft["acceptance"][0]) < 100
