"""The report keeps its published schema and says the same in JSON, text, HTML and terminal."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from data.eval_prompts.contamination import Contamination
from infer.measure.records import DraftResult
from infer.measure.report_schema import DraftMemory, ReplayResult, Report, TextSpan
from infer.report.cost_tables import efficiency_table
from infer.report.mode_tables import overview_table, prompt_length_table, summary_table
from infer.report.prose import build_headline, describe_contamination
from infer.report.report_files import write_report_files
from scripts.report_schema import SCHEMA_FILE, build_schema
from tests.support.made_report import (
    CATEGORIES,
    COMPARED,
    FIGURE,
    as_json,
    draft_run,
    from_json,
    made_report,
    measured,
    printed,
)

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(SCHEMA_FILE.read_text())


@pytest.fixture(scope="module")
def report_without():
    """A report of two drafts with nothing to compare with, on one prompt a category."""
    one = {"per_category": 1}
    lone = DraftResult(
        name="other",
        method="medusa",
        num_parameters=10,
        memory=DraftMemory(weights=40, state=0),
        modes={
            "chain": measured(share=0.5, depth=3, nodes=3, round_s=0.012, seed=1, **one),
            "tree": measured(share=0.5, depth=3, nodes=9, round_s=0.012, seed=2, **one),
        },
        not_measured={"untrained": "the checkpoint holds no config"},
    )
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1, **one)
    made = made_report(plain, plain, [lone, replace(lone, name="org/another")])
    sections = {name: replace(section, ngram=None) for name, section in made.categories.items()}
    return replace(made, ngram=None, not_measured={"ngram": "switched off"}, categories=sections)


JSON_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def faults(value, schema, path="report"):
    """Where `value` breaks `schema`: the keywords that the published schema uses, and no others."""
    known = {
        "$ref",
        "anyOf",
        "const",
        "type",
        "required",
        "properties",
        "additionalProperties",
        "items",
        "minItems",
    }
    known |= {
        "maxItems",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "description",
        "title",
        "$schema",
        "$defs",
        "enum",
        "default",
        "propertyNames",
    }
    assert set(schema) <= known, f"{path}: the checker lacks {set(schema) - known}"
    if "$ref" in schema:
        return faults(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], path)
    if "anyOf" in schema:
        found = [faults(value, choice, path) for choice in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "const" in schema:
        return [] if value == schema["const"] else [f"{path}: not {schema['const']}"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: not one of {schema['enum']}"]
    kind = JSON_TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return [f"{path}: {value!r} is no {schema['type']}"]
    return list(inner_faults(value, schema, path))


def inner_faults(value, schema, path):
    size = len(value) if isinstance(value, str | list | dict) else value or 0
    for low, high in (("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength")):
        if not schema.get(low, size) <= size <= schema.get(high, size):
            yield f"{path}: {value!r} is out of range"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        yield from (
            f"{path}.{key}: missing" for key in schema.get("required", []) if key not in value
        )
        for key, item in value.items():
            yield from faults(key, schema.get("propertyNames", {"type": "string"}), f"{path}.{key}")
            other = schema.get("additionalProperties", True)
            inner = schema.get("properties", {}).get(key, other)
            if inner is False:
                yield f"{path}.{key}: unknown"
            elif inner is not True:
                yield from faults(item, inner, f"{path}.{key}")


def test_the_published_schema_is_that_of_the_dataclasses():
    """To renew it: python -m scripts.report_schema."""
    assert SCHEMA_FILE.read_text() == build_schema()


def test_reports_keep_the_published_schema(report, report_without, comparison):
    for made in (report, report_without, comparison):
        assert faults(as_json(made), SCHEMA) == []


def test_what_not_every_run_measures_may_be_absent(report):
    """The version rises when a field changes or goes; such fields may be added without."""
    old = as_json(report)
    del old["batches"], old["replay"], old["samples"], old["by_prompt_length"], old["training"]
    del old["prompts"]["source"], old["prompts"]["chat_template"], old["prompts"]["lengths"]
    for section in (old, *old["categories"].values()):
        for mode in section["drafts"][0]["modes"].values():
            del mode["split_ms"], mode["bottleneck"], mode["costs_ms"]["level"]
        del section["drafts"][0]["tuned_tree"]
    assert faults(old, SCHEMA) == []
    assert not from_json(old).batches
    assert from_json(old).drafts[0].tuned_tree is None
    assert faults({**old, "schema_version": 1}, SCHEMA) == ["report.schema_version: not 3"]


def test_what_is_predicted_comes_from_the_costs_alone(report):
    for section in (report, *report.categories.values()):
        for mode in section.drafts[0].modes.values():
            costs, tau = mode.costs_ms, mode.acceptance_length.mean
            predicted = tau * costs.autoregressive_step / (costs.draft + costs.verify)
            assert mode.predicted_speedup == pytest.approx(predicted)
            measured_speedup = mode.speedup.mean
            assert mode.efficiency == pytest.approx(measured_speedup / predicted)
    assert all(not hasattr(at, "predicted_speedup") for at in report.batches)


def test_where_nothing_is_compiled_no_graphs_are_counted():
    one = {"per_category": 1, "depth": 0, "nodes": 0, "round_s": 0.01, "seed": 1}
    plain = measured(share=0.0, **one)
    plain.graphs_after_warmup = None
    made = made_report(plain, plain, [])
    assert faults(as_json(made), SCHEMA) == []
    costs = efficiency_table(made)
    assert [row[costs.columns.index("new graphs")] for row in costs.rows] == ["-"] * 2


def test_what_was_measured_apart_from_the_modes_is_there(report, comparison):
    tree = report.drafts[0].modes["tree"]
    assert tree.split_ms.cache_move == pytest.approx(0.3)
    assert tree.bottleneck == "Of 3.15 tokens a round, verifying takes 1.21 autoregressive steps."
    assert report.categories["code"].drafts[0].modes["tree"].bottleneck is None
    both = ReplayResult(tau=FIGURE, all_positions=FIGURE)
    assert comparison.replay == dict.fromkeys(COMPARED, both)
    assert [(at.draft, at.batch, at.speedup.mean) for at in report.batches] == [
        ("eagle3-demo", 16, 1.25),
        ("eagle3-demo", 4, 2.0),
    ]
    assert report.samples[0].pieces[1] == TextSpan(text="return", kind="target")
    wrong = as_json(report)
    wrong["samples"][0]["pieces"][0]["kind"] = "guessed"
    assert faults(wrong, SCHEMA) == [
        "report.samples[0].pieces[0].kind: not one of ['prompt', 'accepted', 'target']"
    ]


def test_memory_bound_speedup_counts_the_drafts_bytes_a_pass(report):
    modes = report.drafts[0].modes
    for name, passes in (("chain", 5), ("tree", 6)):
        tau, bound = modes[name].acceptance_length.mean, modes[name].mbsu.mean
        assert modes[name].draft_passes == passes
        assert bound == pytest.approx(tau / (1 + 1_827_156 / 18_271_560 * passes))
    ngram = report.ngram
    assert ngram.mbsu == ngram.acceptance_length  # a lookup reads no weights
    assert report.autoregressive.mbsu is None


def test_what_the_training_data_holds_is_said_in_one_line_a_finding(report, comparison):
    (line,) = describe_contamination(report)
    assert line == ("eagle3-demo: 1 of the 48 held-out prompts is in the training data (docs-2).")
    first, second = describe_contamination(comparison)
    assert first.startswith("usual, runs/adapted: 1 of the 48")
    assert second.startswith("a-run-with-a-long-name: not checked for held-out prompts in the")
    prompts = replace(report.prompts, contamination={"a": Contamination(checked=True)})
    assert describe_contamination(replace(report, prompts=prompts)) == [
        "a: none of the 48 held-out prompts is in the training data."
    ]


def test_tau_is_told_by_prompt_length_beside_the_longest_row_that_was_learned(report, comparison):
    """48 prompts of 100 to 1,200 tokens: each counts in one bucket, and tau is of that bucket."""
    found = report.by_prompt_length
    assert [(one.up_to, one.prompts) for one in found.buckets] == [
        (256, 8), (512, 12), (1024, 20), (2048, 8)
    ]  # fmt: skip
    rows = [row for row in report.per_prompt if 256 < row.prompt_tokens <= 512]
    tree = [row.modes["eagle3-demo/tree"] for row in rows]
    tau = 1 + sum(row.accepted for row in tree) / sum(row.rounds for row in tree)
    told = found.buckets[1].drafts["eagle3-demo"]["tree"]
    assert told.mean == pytest.approx(tau)
    assert told.ci95[0] < tau < told.ci95[1]
    table = prompt_length_table(report)
    assert table.rows[1][:3] == ["up to 512", "eagle3-demo", "12"]
    assert table.footnotes == [
        "eagle3-demo: trained on rows of at most 512 tokens; it has seen no longer text."
    ]
    assert len(prompt_length_table(comparison).rows) == 4 * 3
    assert report.prompts.lengths == {"shortest": 100, "median": 700, "longest": 1200}


@pytest.mark.parametrize(
    ("rendered", "how"),
    [
        (0, "as plain text"),
        (5, "5 of them through the chat template"),
        (48, "through the chat template"),
    ],
)
def test_the_first_lines_say_which_prompts_from_where(rendered, how):
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1, rendered=rendered)
    made = made_report(plain, plain, [], source="chat.jsonl")
    said = f"48 held-out prompts in 4 categories (held out from chat.jsonl; {how}) were continued"
    assert said in build_headline(made)
    assert made.prompts.source == "held out from chat.jsonl"


def relabeled(*categories: str) -> Report:
    """A report of a draft and its target on 48 prompts, to which these categories are dealt."""
    report_modes = [
        measured(share=share, depth=depth, nodes=depth, round_s=0.01, seed=1)
        for share, depth in ((0.0, 0), (0.3, 5))
    ]
    for mode in report_modes:
        mode.prompt_results = [
            replace(r, prompt=replace(r.prompt, category=categories[i % len(categories)]))
            for i, r in enumerate(mode.prompt_results)
        ]
    return made_report(*report_modes, [])


@pytest.mark.parametrize("category", ["all", "chat"])
def test_a_single_category_is_not_told_twice(category):
    report = relabeled(category)
    for table in (overview_table(report), summary_table(report)):
        modes = ["autoregressive", "ngram"]
        assert [row[:2] for row in table.rows] == [["all (48)", mode] for mode in modes]
    assert "48 held-out prompts (" in build_headline(report)


@pytest.mark.parametrize("categories", [("all", "code"), ("code", "all", "docs")])
def test_prompts_without_a_category_do_not_pass_for_all_of_them(categories):
    names = {row[0] for row in summary_table(relabeled(*categories)).rows}
    each = 48 // len(categories)
    own = {f"{name} ({each})" for name in categories if name != "all"}
    assert names == {"all (48)", f"other ({each})"} | own


def test_every_round_of_every_mode_is_kept(report, tmp_path):
    write_report_files(report, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 48 * 5
    assert set(lines[0]) == {
        "prompt_id", "category", "turn", "mode", "ids", "accepted", "drafted", "round_s",
        "prefill_s",
    }  # fmt: skip
    tree = [line for line in lines if line["mode"] == "eagle3-demo/tree"]
    pooled = sum(sum(line["accepted"]) for line in tree) / sum(
        len(line["accepted"]) for line in tree
    )
    length = report.drafts[0].modes["tree"].acceptance_length.mean
    assert 1 + pooled == pytest.approx(length)
    assert all(len(line["round_s"]) == len(line["drafted"]) for line in lines)
    assert not list(tmp_path.glob(".*"))


def test_the_schema_refuses_what_it_does_not_name(report):
    content = as_json(report)
    assert faults({**content, "tau": 1}, SCHEMA) == ["report.tau: unknown"]
    broken = {**content, "autoregressive": {**content["autoregressive"], "batch": "1"}}
    assert faults(broken, SCHEMA) == ["report.autoregressive.batch: '1' is no integer"]
    del broken["autoregressive"]
    assert faults(broken, SCHEMA) == ["report.autoregressive: missing"]


def properties(schema):
    """The name of every field the schema defines."""
    for key, inner in schema.items():
        if key == "properties":
            yield from inner
        if isinstance(inner, dict):
            yield from properties(inner)


def test_every_field_is_documented():
    quoted = re.findall(r"`([^`]+)`", (ROOT / "docs/report.md").read_text())
    assert set(properties(SCHEMA)) <= set(re.findall(r"\w+", " ".join(quoted)))


def test_every_category_holds_every_mode(report):
    assert list(report.categories) == list(CATEGORIES)
    assert report.prompts.by_category == dict.fromkeys(CATEGORIES, 12)
    for category in report.categories.values():
        assert category.drafts[0].modes["tree"].prompts == 12
    assert report.categories["docs"].drafts[0].modes["tree"].mismatched_prompts == 0
    assert report.categories["code"].drafts[0].modes["tree"].mismatched_prompts == 1


def test_figures_agree_with_the_rows_of_the_prompts(report):
    tree = report.drafts[0].modes["tree"]
    rows = [row.modes["eagle3-demo/tree"] for row in report.per_prompt]
    rounds = sum(row.rounds for row in rows)
    tau = sum(row.accepted + row.rounds for row in rows) / rounds
    assert tree.acceptance_length.mean == pytest.approx(tau)
    assert 1 + sum(tree.acceptance_by_position.marginal) == pytest.approx(tau)
    assert tree.efficiency == pytest.approx(tree.speedup.mean / (tau * 0.01 / 0.015))
    gain = report.drafts[0].gain["tree"]["over_ngram"]
    assert gain["acceptance_length"].mean == pytest.approx(
        tau - report.ngram.acceptance_length.mean
    )
    assert gain["acceptance_rate"] is None


def test_a_mode_that_was_not_measured_is_null_with_its_reason(report_without):
    draft = report_without.drafts[0]
    assert draft.modes["untrained"] is None
    assert draft.not_measured == {"untrained": "the checkpoint holds no config"}
    assert draft.gain["tree"]["over_untrained"] is None
    assert "ngram: not measured: switched off" in printed(report_without)


def test_answers_of_one_token_have_no_rounds_and_no_figures(tmp_path):
    mode = measured(share=0.5, depth=3, nodes=3, round_s=0.012, seed=1, per_category=1)
    for trace in mode.prompt_results:
        answer = trace.generation
        answer.ids, answer.accepted, answer.drafted, answer.round_s = [7], [], [], []
    memory = DraftMemory(weights=0, state=0)
    modes = dict.fromkeys(("untrained", "chain", "tree"), mode)
    draft = DraftResult(name="a", method="m", num_parameters=0, memory=memory, modes=modes)
    drafts = [draft, replace(draft, name="b")]
    made = made_report(mode, mode, drafts)
    write_report_files(made, tmp_path)
    assert faults(json.loads((tmp_path / "report.json").read_text()), SCHEMA) == []
    assert made.ngram.acceptance_length is made.ngram.itl_ms is None
    assert made.ngram.ttft_ms.p50 > 0


def test_json_text_page_and_terminal_say_the_same(report, tmp_path):
    write_report_files(report, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "rounds.jsonl",
    ]
    saved = json.loads((tmp_path / "run/report.json").read_text())
    length = from_json(saved).drafts[0].modes["tree"].acceptance_length
    tau = f"{length.mean:.2f} [{length.ci95[0]:.2f}, {length.ci95[1]:.2f}]"
    for said in (
        (tmp_path / "run/report.md").read_text(),
        (tmp_path / "run/report.html").read_text(),
        printed(report),
    ):
        assert tau in said


def test_drafts_that_gain_nothing_make_a_picture_too(tmp_path):
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1)
    modes = dict.fromkeys(("untrained", "chain", "tree"), plain)
    draft = replace(draft_run("a", 3), modes=modes)
    drafts = [draft, replace(draft, name="b")]
    write_report_files(made_report(plain, plain, drafts), tmp_path)
    assert ">speed-up</text>" in (tmp_path / "report.html").read_text()


def test_terminal_output_is_plain_and_fits_a_hundred_columns(report, report_without, comparison):
    for made in (report, report_without, comparison):
        text = printed(made)
        assert max(map(len, text.splitlines())) <= 100
        assert text.isascii()


def test_a_terminal_shows_headings_in_bold(report, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1m" in printed(report, force_terminal=True, width=100)
