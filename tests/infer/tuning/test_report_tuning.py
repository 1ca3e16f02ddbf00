"""`tune=true` chooses the fastest tree on prompts of its own, and says where nothing can be tuned."""

import copy
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from conf.entry import compose
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.config import EvalConf, EvaluationConf, GenerateConf
from infer.inputs.command_inputs import load_draft_under_test
from infer.inputs.command_start import start_command
from infer.measure.eval_modes import DraftUnderTest, TunedDecoding, build_eval_modes
from infer.measure.evaluate import evaluate_drafts
from infer.report.prose import build_headline
from infer.report.views import get_draft_modes
from infer.tuning import cost_model, report_tuning
from infer.tuning.candidates import list_candidates
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostBench
from infer.tuning.report_tuning import build_tune_conf, choose_prompts, list_rivals, tune_drafts_for_report
from infer.tuning.results import DraftTuning
from infer.tuning.search import choose_tree, estimate_candidates
from infer.verify.config import Verification
from models.drafts.ngram import NgramDraft
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from tests.support.models.tiny import new_draft, sampled_texts
from tests.support.reports.sample_reports import as_json, from_json
from tests.support.reports.tuning import GIVEN_TREE, TABLE, costs

OWN = TargetConf(name="tiny")
TREE = TreeConf(depth=2, nodes=4, beam_width=2, children=2, ngram_tokens=3)


@pytest.fixture(autouse=True)
def small_search(monkeypatch):
    """Search few trees and timings."""
    monkeypatch.setattr(report_tuning, "NODE_BUDGETS", [4])
    monkeypatch.setattr(report_tuning, "MAX_DEPTH", 2)
    monkeypatch.setattr(cost_model, "TIMED_TURNS", 1)
    monkeypatch.setattr(cost_model, "MAX_EXTRA_TIMINGS", 1)


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    """Return beginnings of the target's own texts that end within a loop, which lookup continues."""
    long = sampled_texts(target, count=8, length=56)
    return [long[number][:cut] for number, cut in ((1, 20), (4, 34), (7, 52), (1, 30), (7, 50))]


@pytest.fixture
def run(tmp_path, target, texts) -> Path:
    """Return a run of a draft without training; a prompt of its report also chose its checkpoint."""
    new_draft(target).save(tmp_path / "run" / "checkpoint", target)
    for name, part in (("held_out", texts[:3]), ("selection", texts[2:])):
        rows = [{"id": f"{name}-{i}", "category": "a", "ids": ids} for i, ids in enumerate(part)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "run" / f"{name}.jsonl").write_text(text)
    return tmp_path / "run"


def build_evaluation(run: Path, **changes) -> EvaluationConf:
    settings = {"prompts": str(run / "held_out.jsonl"), "max_new_tokens": 8, "batch_sizes": []}
    return EvaluationConf(**settings | changes)


def tune_draft(target, run: Path, conf: EvaluationConf, **changes):
    draft = load_draft_under_test(run / "checkpoint", target)
    settings = {"tree": TREE, "conf": conf, "target_conf": OWN, "run": run} | changes
    (tuned,) = tune_drafts_for_report(target, [draft], **settings)
    return tuned


def test_an_untrained_draft_of_a_repeating_target_is_replaced_by_lookup_alone(target, run, capsys):
    """Lookup finds the period in which the tiny target loops; a draft without training never does."""
    conf, stale = build_evaluation(run), run / "run-tuned.json"
    stale.write_text("{}")
    draft = tune_draft(target, run, conf, round_seconds=costs(node_s=0.01, pass_s=0.1))
    assert TreeConf(file=str(stale)).is_lookup  # the earlier choice is replaced
    assert TreeConf(file=str(stale)).build() == draft.tuned.tree
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "compil" in line]  # nothing is, on this device
    assert draft.tuned.description.startswith("n-gram lookup alone, ")
    assert lines[0].startswith("tune: timing trees on 2 of the prompts that the report ")
    assert lines[-2].startswith(f"tune: run: {draft.tuned.description}, speed-up ")
    assert lines[-2].endswith(" s")
    assert lines[-1].startswith("to answer with it: python -m infer.generate ")
    report = evaluate_drafts(target, [draft], tree=TREE, conf=conf)
    (section,) = report.drafts
    assert section.tuned_tree == draft.tuned.description
    modes = get_draft_modes(report, section)
    assert modes["tuned"].verdict.lossless == "yes"
    assert modes["tuned"].figures.acceptance_length.mean > modes["tree"].figures.depth
    assert set(modes) == {"untrained", "chain", "tree", "tuned"}
    assert as_json(from_json(as_json(report))) == as_json(report)
    assert f"run {section.tuned_tree} (speed-up " in build_headline(report)


def test_a_tuned_tree_is_left_as_a_file_with_the_command_that_answers_with_it(target, run, capsys):
    """Where lookup alone is slow, the period in which the target loops is copied beside a tree."""

    def round_seconds(decoder, generation):
        return [9.0 if isinstance(decoder.draft, NgramDraft) else 1.0] * generation.rounds

    draft = tune_draft(target, run, build_evaluation(run), round_seconds=round_seconds)
    command, _, prompt = capsys.readouterr().out.splitlines()[-1].partition(" prompt=")
    assert command.startswith("to answer with it: python -m infer.generate checkpoint=")
    assert prompt == '"..."'
    conf = compose("generate", GenerateConf, [*shlex.split(command)[7:], "prompt=hello"])
    assert conf.tree.build() == draft.tuned.tree
    assert conf.checkpoint == str(run / "checkpoint")
    named = compose("generate", GenerateConf, [f"checkpoint={conf.checkpoint}", "tree=tuned", "prompt=hello"])
    start_command(named, None)
    assert named.tree.build() == draft.tuned.tree


def test_a_tuned_tree_is_asked_for_in_vain_where_none_was_chosen(run, tmp_path):
    conf = compose("eval", EvalConf, [f"checkpoint={run / 'checkpoint'}", "tree=tuned"])
    with pytest.raises(UserError, match=r"^tree: tuned needs the tree that tune=true chose for this draft, got none"):
        start_command(conf, None)
    with pytest.raises(UserError, match=r"^tree: tuned belongs to a checkpoint, got it in a command without one; "):
        TreeConf(file="tuned").build()
    two = [str(run / "checkpoint"), str(tmp_path / "other" / "checkpoint")]
    shutil.copytree(run, tmp_path / "other")
    with pytest.raises(UserError, match=r"^tree: must not be tuned for 2 checkpoints; give one$"):
        start_command(replace(conf, checkpoint=two), None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no space\nfor a kernel"), "BackendCompilerFailed: backend="),
        (NotImplementedError("operator"), "BackendCompilerFailed: backend="),
        (None, "InvalidBackend: Invalid backend: 'none'"),
    ],
    ids=["error", "operator", "backend"],
)
def test_a_finished_run_is_measured_whatever_stops_the_tuner(target, run, capsys, error, reason):
    def compile_nothing(*_):
        raise error

    failing = copy.copy(target)
    backend = "none" if error is None else compile_nothing
    failing.device = replace(target.device, compiles=True, backend=backend)
    draft = tune_draft(failing, run, build_evaluation(run))
    assert draft.tuned is None
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.startswith(f"tune: not tuned, the report has no mode `tuned`. {reason}")


@pytest.mark.parametrize(("node_s", "pays"), [(0.01, True), (10.0, False)])
def test_the_simplest_of_the_fastest_trees_is_chosen_and_no_speculation_where_nothing_pays(target, texts, node_s, pays):
    draft, conf = new_draft(target), EvaluationConf(max_new_tokens=8)
    settings = build_tune_conf(TREE, draft, conf)
    prompts = [EvalPrompt(id=str(i), category="a", ids=ids) for i, ids in enumerate(texts)]
    tuning = estimate_candidates(target, "new", Path(), draft, prompts, settings)
    bench = CostBench(
        target=target,
        draft=draft,
        prompts=prompts,
        conf=settings,
        batch=1,
        context=64,
        round_seconds=costs(node_s=node_s),
    )
    rivals = list_rivals(tuning, TREE)
    result = choose_tree(bench, tuning, rivals)
    assert {rival.name for rival in rivals} <= set(result.speedups)
    speedup = result.speedups[result.best.name]
    assert (speedup.mean > 1) == pays == (result.choice is not None)
    sizes = {candidate.name: candidate.size for candidate in tuning.candidates}
    as_fast = [name for name, over in result.best_over_each.items() if over.mean == 1]
    assert sizes[result.best.name] == min(sizes[name] for name in as_fast)


def test_no_speculation_is_a_mode_that_drafts_nothing(target, run):
    decoding = TunedDecoding(description="no speculation", draft=None, tree=NO_TREE)
    draft = replace(load_draft_under_test(run / "checkpoint", target), tuned=decoding)
    report = evaluate_drafts(target, [draft], tree=TREE, conf=build_evaluation(run))
    mode = report.overall.modes["run/tuned"]
    assert report.drafts[0].tuned_tree == "no speculation"
    assert (mode.figures.nodes, mode.verdict.lossless) == (0, "yes")
    assert mode.figures.acceptance_length.mean == 1


def test_prompts_of_the_report_do_not_choose_the_tree(target, run):
    """One prompt stands in both files."""
    conf = build_evaluation(run)
    chosen = choose_prompts(target, [run / "checkpoint"], OWN, conf)
    reported_prompts = load_eval_prompts(target.tokenizer, conf.prompts, limit=None)
    assert len(chosen) == 2
    assert not {tuple(p.ids) for p in chosen} & {tuple(p.ids) for p in reported_prompts}


@pytest.mark.parametrize(
    "tree", [TREE, GIVEN_TREE, TreeConf(kind=TreeKind.chain, depth=3), TreeConf(depth=3, ngram_tokens=8)]
)
def test_every_mode_of_the_report_is_among_the_decoded_trees(target, run, tree):
    draft = load_draft_under_test(run / "checkpoint", target)
    conf = build_evaluation(run)
    settings = build_tune_conf(tree, draft.draft, conf)
    candidates = list_candidates(
        TABLE[: settings.depth],
        node_budgets=settings.nodes,
        ngram_tokens=settings.ngram_tokens,
        user_tree=tree,
        ngram_windows=settings.ngram_windows,
    )
    tuning = DraftTuning(
        name="run", directory=run, candidates=candidates, expected_tokens={}, acceptance=TABLE, rounds=[9] * len(TABLE)
    )
    decoded = {(rival.is_lookup, rival.tree) for rival in list_rivals(tuning, tree)}
    prompts = load_eval_prompts(target.tokenizer, conf.prompts, limit=None)
    modes = build_eval_modes(target, [draft], tree.build(), prompts, conf)
    reported = {(name == "ngram", modes[name].decoder.tree) for name in ("ngram", "run/chain", "run/tree")}
    assert reported <= decoded


def test_a_chain_longer_than_lookup_can_copy_is_measured_beside_the_longest_lookup(target):
    draft = new_draft(target, max_depth=100)
    tree = TreeConf(kind=TreeKind.chain, depth=80)
    candidate = DraftUnderTest(name="new", draft=draft, untrained="it is new")
    prompts = [EvalPrompt(id="1", category="all", ids=[3, 4])]
    modes = build_eval_modes(target, [candidate], tree.build(), prompts, EvaluationConf(max_new_tokens=8))
    assert modes["ngram"].decoder.tree.depth == 64
    assert modes["new/chain"].decoder.tree.depth == 80
    assert build_tune_conf(tree, draft, EvaluationConf(max_new_tokens=8)).ngram_windows[-1] == 64


def test_a_window_of_lookup_is_a_chain_that_infer_eval_decodes_with_the_draft_too(target):
    """A Medusa draft proposes as many tokens as it has heads."""
    few, prompts = new_draft(target, max_depth=5), [EvalPrompt(id="1", category="all", ids=[3, 4])]
    settings = build_tune_conf(TreeConf(kind=TreeKind.chain, depth=3), few, EvaluationConf(max_new_tokens=8))
    tuning = estimate_candidates(target, "few", Path(), few, prompts, settings)
    assert [candidate.tree.depth for candidate in tuning.candidates if candidate.is_lookup] == [3, 4]


SKIPPED = {"evaluation.verification": {"verification": Verification.typical}, "prompts": {"file": "selection.jsonl"}}


@pytest.mark.parametrize("key", SKIPPED)
def test_a_run_that_cannot_be_tuned_says_so_in_one_line_and_goes_on(target, run, capsys, key):
    changes = dict(SKIPPED[key])
    if file := changes.pop("file", None):
        (run / file).unlink()
    sampled = SamplingConf(temperature=1.0)
    verification = changes.pop("verification", Verification.auto)
    conf = build_evaluation(run, sampling=sampled, verification=verification)
    draft = tune_draft(target, run, conf, **changes)
    (line,) = capsys.readouterr().out.splitlines()
    assert draft.tuned is None
    assert line.startswith(f"tune: not tuned, the report has no mode `tuned`. {key}: must ")
    _, remedy, command = line.partition(". To tune apart from it: python -m infer.tune ")
    assert bool(remedy) == (key == "prompts")  # it would not tune for the rule either
    if remedy:
        assert compose("tune", TuneConf, shlex.split(command)).checkpoint == [str(run / "checkpoint")]


def test_a_device_that_compiles_for_hours_tunes_nothing(target, run, capsys, monkeypatch):
    monkeypatch.setattr(target, "device", replace(target.device, name="neuron"))
    draft = tune_draft(target, run, build_evaluation(run))
    (line,) = capsys.readouterr().out.splitlines()
    assert draft.tuned is None
    assert "device: must compile a shape in seconds" in line
