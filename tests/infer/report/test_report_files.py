"""A report keeps its published schema, and its figures follow from the rows of its prompts."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from infer.report.report_files import write_report_files
from infer.results.records import Exactness
from infer.results.schema import DraftMemory, LosslessVerdict
from scripts.report_schema import SCHEMA_FILE, build_schema
from tests.support.reports.sample_reports import (
    CATEGORIES,
    as_json,
    build_sample_report,
    described,
    from_json,
    measured,
    printed,
)

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(SCHEMA_FILE.read_text())
TREE = "eagle3-demo/tree"


def test_the_published_schema_is_that_of_the_dataclasses():
    """Write it anew with `python -m scripts.report_schema`."""
    assert SCHEMA_FILE.read_text() == build_schema()


def list_properties(schema):
    """List the name of every field that the schema defines."""
    for key, inner in schema.items():
        if key == "properties":
            yield from inner
        if isinstance(inner, dict):
            yield from list_properties(inner)


def test_every_field_is_documented():
    quoted = re.findall(r"`([^`]+)`", (ROOT / "docs/report.md").read_text())
    assert set(list_properties(SCHEMA)) <= set(re.findall(r"\w+", " ".join(quoted)))


def test_reports_come_back_equal_from_their_files(report, comparison):
    for written in (report, comparison):
        assert as_json(from_json(as_json(written))) == as_json(written)


def test_the_schema_refuses_other_versions_and_values(report):
    content = as_json(report)
    span = content["drafts"][0]["samples"][0]["pieces"][0]
    for parent, key, value in (
        (content, "schema_version", 3),
        (content["overall"]["modes"]["ngram"]["figures"], "depth", -1),
        (span, "kind", "guessed"),
    ):
        original = parent[key]
        parent[key] = value
        with pytest.raises(ValidationError):
            from_json(content)
        parent[key] = original
    from_json(content)


def test_the_predicted_speedup_comes_from_the_parts_of_a_round_alone(report):
    """A step of the target takes 10 ms."""
    for section in (report.overall, *report.categories.values()):
        for name, round_ms in (("chain", 13), ("tree", 15)):
            figures = section.modes[f"eagle3-demo/{name}"].figures
            predicted = figures.acceptance_length.mean * 10 / round_ms
            assert figures.predicted_speedup == pytest.approx(predicted)
            assert figures.efficiency == pytest.approx(figures.speedup.mean / predicted)
    assert report.overall.modes["autoregressive"].figures.predicted_speedup is None


def test_every_round_of_every_mode_is_recorded(report, tmp_path):
    write_report_files(report, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 48 * 5
    assert set(lines[0]) == set("prompt_id category turn mode ids accepted drafted round_s prefill_s".split())
    accepted = [count for line in lines if line["mode"] == TREE for count in line["accepted"]]
    tau = report.overall.modes[TREE].figures.acceptance_length.mean
    assert 1 + sum(accepted) / len(accepted) == pytest.approx(tau)
    assert all(len(line["round_s"]) == len(line["drafted"]) for line in lines)
    assert not list(tmp_path.glob(".*"))


def test_every_category_holds_every_mode_on_its_own_prompts(report):
    assert list(report.categories) == list(CATEGORIES)
    assert report.setup.prompts.by_category == dict.fromkeys(CATEGORIES, 12)
    assert report.setup.prompts.lengths == {"shortest": 100, "median": 700, "longest": 1200}
    for section in report.categories.values():
        assert section.modes.keys() == report.overall.modes.keys()
        assert section.modes[TREE].figures.prompts == 12
    mismatched = {name: section.modes[TREE].verdict.mismatched_prompts for name, section in report.categories.items()}
    assert mismatched == dict.fromkeys(CATEGORIES, 0) | {"code": 1}


def test_a_draft_without_training_is_no_gain_over_others(report):
    assert report.overall.modes["eagle3-demo/untrained"].gains == {}


def test_a_draft_with_its_own_target_is_compared_with_that(comparison):
    modes = comparison.overall.modes
    own, tree = (modes[f"runs/adapted/{name}"] for name in ("autoregressive", "tree"))
    plain = modes["autoregressive"]
    speeds = [mode.figures.tokens_per_s.mean for mode in (tree, own, plain)]
    assert tree.figures.speedup.mean == pytest.approx(speeds[0] / speeds[1])
    assert speeds[1] > 1.1 * speeds[2]  # the two baselines differ, so it matters which
    assert own.figures.speedup.ci95 == [1.0, 1.0]
    difference = tree.figures.speedup.mean - modes["ngram"].figures.speedup.mean
    assert tree.gains["ngram"]["speedup"].mean == pytest.approx(difference)


def test_a_rule_is_lossy_by_its_proof_and_then_never_lossless(comparison):
    rules = ("greedy", "coupled", "rejection", "block", "typical")
    assert {rule for rule in rules if Exactness().judge(rule).lossy} == {"typical"}
    assert Exactness().judge("block").lossless == LosslessVerdict.yes
    for key, mode in comparison.overall.modes.items():
        is_typical = key.startswith("a-run-with-a-long-name/")
        assert mode.verdict.lossy == is_typical
        assert (mode.verdict.lossless == "no") == is_typical


def test_answers_of_one_token_have_no_rounds_and_no_figures(tmp_path):
    mode = measured(share=0.5, depth=3, nodes=3, round_s=0.012, seed=1, per_category=1)
    for result in mode.prompt_results:
        answer = result.generation
        answer.ids, answer.accepted, answer.drafted, answer.round_s, answer.share_s = ([7], [], [], [], [])
    keys = ("autoregressive", "ngram", *(f"{n}/{m}" for n in "ab" for m in ("chain", "tree")))
    memory = DraftMemory(weights=0, state=0)
    drafts = [described(name, memory_bytes=memory) for name in "ab"]
    report = build_sample_report(dict.fromkeys(keys, mode), drafts)
    write_report_files(report, tmp_path)
    from_json(json.loads((tmp_path / "report.json").read_text()))
    figures = report.overall.modes["ngram"].figures
    assert figures.acceptance_length is figures.itl_ms is None
    assert figures.ttft_ms.p50 > 0


def test_json_text_page_and_terminal_say_the_same(report, tmp_path):
    folder = tmp_path / "run"
    write_report_files(report, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "report.md", "rounds.jsonl"]
    saved = from_json(json.loads((folder / "report.json").read_text()))
    length = saved.overall.modes[TREE].figures.acceptance_length
    tau = f"{length.mean:.2f} [{length.ci95[0]:.2f}, {length.ci95[1]:.2f}]"
    texts = [(folder / name).read_text() for name in ("report.md", "report.html")]
    assert all(tau in text for text in (*texts, printed(report)))


def test_drafts_that_gain_nothing_are_drawn_too(tmp_path):
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1)
    keys = ("autoregressive", "ngram", *(f"{n}/{m}" for n in "ab" for m in ("chain", "tree")))
    report = build_sample_report(dict.fromkeys(keys, plain), [described("a"), described("b")])
    write_report_files(report, tmp_path)
    assert ">speed-up</text>" in (tmp_path / "report.html").read_text()
