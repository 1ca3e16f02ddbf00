"""The page and the tables promise: all is shown, all is defined, and nothing comes from outside."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from markupsafe import escape

from infer.measure.report_schema import SampleAnswer, TextSpan
from infer.report.cost_tables import ROUND_PARTS, batch_table, replay_table, split_table
from infer.report.definitions import DEFINITIONS, get_definition
from infer.report.mode_tables import acceptance_table, exactness_table, summary_table
from infer.report.number_format import ABSENT
from infer.report.report_files import KIND_LEGEND, render_page
from infer.report.tables import build_tables, collect_definitions, render_markdown
from infer.report.views import list_modes
from tests.support.made_report import COMPARED, PIECES, as_json, from_json, printed

DOCS = (Path(__file__).parents[2] / "docs/report.md").read_text()


@pytest.fixture(scope="module")
def old(report):
    """Of the same version, from before some things were measured."""
    made = as_json(report)
    del made["batches"], made["replay"], made["samples"], made["training"]
    for section in (made, *made["categories"].values()):
        modes = [section["autoregressive"], section["ngram"]]
        for mode in (*modes, *section["drafts"][0]["modes"].values()):
            del mode["split_ms"], mode["bottleneck"]
    return from_json(made)


@pytest.fixture(scope="module")
def report_page(report):
    return render_page(report)


@pytest.fixture(scope="module")
def comparison_page(comparison):
    return render_page(comparison)


@pytest.fixture(scope="module")
def old_page(old):
    return render_page(old)


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def test_every_mode_is_in_the_page_and_in_the_text(
    report, comparison, report_page, comparison_page
):
    for made, html in ((report, report_page), (comparison, comparison_page)):
        text = render_markdown(made)
        for one in list_modes(made):
            assert f'<td class="label">{escape(one.label)}</td>' in html
            assert f"| {one.label} |" in text


def test_the_page_needs_nothing_from_outside(report_page, comparison_page, old_page):
    for html, pictures in ((report_page, 7), (comparison_page, 8), (old_page, 4)):
        assert "http" not in html
        assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
        assert html.count("<svg") == html.count("</svg>") == pictures
        assert "color-scheme: light dark" in html


def test_text_from_outside_is_escaped_in_the_page(report):
    strange = "a <script> & b"
    sample = SampleAnswer(
        draft=strange,
        prompt_id=strange,
        mode="tree",
        pieces=[TextSpan(text=strange, kind="accepted")],
    )
    html = render_page(replace(report, command=strange, samples=[sample]))
    assert "<script" not in html
    assert html.count(escape(strange)) >= 3


def test_every_figure_of_every_table_is_defined_and_nothing_else(report, comparison):
    shown = build_tables(report) + build_tables(comparison)
    for table in shown:
        assert all(get_definition(name) for name in table.columns[table.label_columns :]), (
            table.title
        )
    assert collect_definitions(shown) == DEFINITIONS


def test_definitions_are_on_hover_under_the_tables_and_in_the_docs(report, report_page):
    html, text = report_page, render_markdown(report)
    for word, meaning in collect_definitions(build_tables(report)).items():
        assert f'title="{escape(meaning)}"' in html
        assert f">{escape(word)}</dt><dd>{escape(meaning)}.</dd>" in html
        assert f"- **{word}**: {meaning}." in text
    goals = re.findall(r'href="#(is-[^"]*)"', html)
    assert goals
    assert all(html.count(f'id="{goal}"') == 1 for goal in goals)
    for word, meaning in DEFINITIONS.items():
        assert f"| {word} | {meaning} |" in DOCS


def test_a_round_is_taken_apart_and_its_bottleneck_stands_below(report, report_page):
    table = split_table(report)
    assert column(table, "mode") == ["autoregressive", "ngram", "untrained", "chain", "tree"]
    names = [part.replace("_", " ") for part in ROUND_PARTS]
    assert [column(table, name)[-1] for name in names] == ["12.10", "0.40", "0.30", "2.00", "0.20"]
    for name, value in (("sum", "15.00"), ("round", "15.00"), ("fused round", "14.00")):
        assert column(table, name)[-1] == value
    sentence = "Of 3.15 tokens a round, verifying takes 1.21 autoregressive steps."
    assert table.footnotes[:-1] == [f"tree: {sentence}"]
    assert sentence in report_page
    assert f"- tree: {sentence}" in render_markdown(report)


def test_what_a_level_costs_stands_beside_the_levels_that_pay(report, comparison, report_page):
    """A chain of 5 in rounds of 13 ms, 2 of them to draft, where a step takes 10 ms."""
    table = split_table(report)
    assert column(table, "level ms")[-2:] == ["0.40", "0.33"]
    assert column(table, "level steps")[-2:] == ["0.04", "0.03"]
    assert column(table, "level ms")[0] == ABSENT  # nothing is drafted
    cheap = (
        "A level of the chain adds 0.06 autoregressive steps to a round, 0.04 of them to draft it. "
        "It pays if the share of rounds that accept it is above that times the speed-up without "
        "it: all 5 pay, and a deeper chain may too."
    )
    assert table.footnotes[-1] == cheap
    assert cheap in report_page
    assert f"usual: {cheap}" in " ".join(printed(comparison).split())
    made = as_json(report)
    for draft_ms, verdict in (
        (14.0, "2 of 5 pay, counted from the first."),
        (97.0, "not even the first pays, which 0.67 of rounds accept: n-gram lookup alone or no "
         "speculation is the right answer."),
    ):  # fmt: skip
        made["drafts"][0]["modes"]["chain"]["costs_ms"].update(draft=draft_ms, level=draft_ms / 5)
        assert split_table(from_json(made)).footnotes[-1].endswith(verdict)
    made["drafts"][0]["modes"]["chain"]["costs_ms"].pop("level")
    assert len(split_table(from_json(made)).footnotes) == 1


def test_the_tuned_mode_is_named_in_the_first_lines_and_shown_as_the_others(report, report_page):
    made = as_json(report)
    for section in (made, *made["categories"].values()):
        (draft,) = section["drafts"]
        draft["tuned_tree"] = "chain of 5"
        draft["modes"]["tuned"] = draft["modes"]["chain"]
    for row in made["per_prompt"]:
        row["modes"]["eagle3-demo/tuned"] = row["modes"]["eagle3-demo/chain"]
    tuned = from_json(made)
    assert column(summary_table(tuned), "mode")[-1] == "tuned"
    speedup = tuned.drafts[0].modes["chain"].speedup
    said = "Tuned for this device on other prompts: eagle3-demo chain of 5 (speed-up "
    said += f"{speedup.mean:.2f} ["
    for text in (render_page(tuned), render_markdown(tuned)):
        assert said in text
    assert "eagle3-demo, tuned to chain of 5: " in printed(tuned)
    assert "Tuned" not in report_page
    assert max(map(len, printed(tuned).splitlines())) <= 100
    assert max(map(len, printed(report).splitlines())) <= 100


def test_speed_against_batch_size_begins_with_one_row(report, comparison):
    table = batch_table(report)
    assert column(table, "batch") == ["1", "4", "16"]
    tree = report.drafts[0].modes["tree"]
    assert column(table, "speed-up")[0].startswith(f"{tree.speedup.mean:.2f} [")
    assert column(table, "speed-up")[1:] == ["2.00 [1.80, 2.30]", "1.25 [1.05, 1.55]"]
    assert column(table, "tokens/s")[1:] == ["1234.5"] * 2
    # a draft with a target of its own is beside that, alone too
    own = comparison.drafts[1].modes["autoregressive"].tokens_per_s.mean
    assert column(batch_table(comparison), "autoregressive tokens/s")[3] == f"{own:.1f}"


def test_verdicts_of_modes_and_batches_are_shown_and_an_open_one_says_what_decides_it(
    report, report_page
):
    made = as_json(report)
    tree = made["drafts"][0]["modes"]["tree"]
    for judged in (tree, *made["batches"]):
        judged.update(lossless="undecided", near_tie_gap=3.0, explained_gap=0.5)
    made["device"]["dtype"] = "bfloat16"
    made = from_json(made)
    assert column(summary_table(made), "lossless")[3:5] == ["yes", "undecided"]
    assert column(exactness_table(made), "explained gap")[-1] == "0.5"
    assert column(batch_table(made), "lossless") == ["undecided"] * 3
    said = (
        "undecided: a near-tie gap of 3 logits is wider than the 0.5 that bfloat16 explains in "
        "this target; decode with device.precision=float32."
    )
    for text in (render_page(made), render_markdown(made), " ".join(printed(made).split())):
        assert said in text
        assert said not in report_page


def test_what_was_not_measured_is_left_out(report, old, old_page):
    for made in (replace(report, batches=[]), old):
        assert "batch size" not in render_page(made) + render_markdown(made) + printed(made)
    for said in (old_page, render_markdown(old), printed(old)):
        assert "Where a round's time goes" not in unescape(said)
        assert "Sample answers" not in said
        assert "Replay" not in said


def test_tau_per_prompt_stands_beside_tau(report, comparison):
    tree = report.drafts[0].modes["tree"]
    for name, figure in (
        ("tau", tree.acceptance_length),
        ("tau per prompt", tree.acceptance_length_per_prompt),
    ):
        assert column(acceptance_table(report), name)[-1].startswith(f"{figure.mean:.2f} [")
    assert column(replay_table(comparison), "draft") == list(COMPARED)


def test_ratio_rules_are_exact_in_distribution_and_not_compared(report):
    made = as_json(report)
    for mode, rule in (("chain", "block"), ("tree", "rejection")):
        made["drafts"][0]["modes"][mode]["verification"] = rule
    made = from_json(made)
    assert column(summary_table(made), "lossless")[3:5] == ["in distribution"] * 2
    for row in exactness_table(made).rows[-2:]:
        assert row[1:] == ["in distribution", *[ABSENT] * 5]
    assert "verification: exact, block and rejection" in render_page(made)


def test_answers_show_who_wrote_what_and_keep_their_white_space(
    report, report_page, comparison_page
):
    for kind, text in PIECES.items():
        assert f'<span class="{kind}">{escape(text)}</span>' in report_page
        assert f'<span class="{kind}">{escape(KIND_LEGEND[kind])}</span>' in report_page
        assert f".{kind} {{" in report_page
    assert "white-space: pre-wrap" in report_page
    accepted = report_page[report_page.index(".accepted {") :]
    assert "underline" in accepted[: accepted.index("}")]  # not by color alone
    assert comparison_page.count("<details") == len(COMPARED)
    long = replace(report.samples[0], pieces=[TextSpan(text="x" * 9999, kind="prompt")])
    assert "x" * 401 not in render_page(replace(report, samples=[long]))
