"""The page, the text and the terminal show every mode, define every figure and need no network."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from markupsafe import escape

from infer.engine.phase_timer import PHASES
from infer.report.definitions import DEFINITIONS
from infer.report.number_format import ABSENT
from infer.report.plots import render_plots
from infer.report.prose import build_headline
from infer.report.report_files import KIND_LEGEND, render_page
from infer.report.tables import (
    batch_table,
    build_tables,
    collect_definitions,
    exactness_table,
    overview_table,
    render_markdown,
    split_table,
    summary_table,
)
from infer.report.views import assign_draft_colors, list_modes
from infer.results.schema import SampleAnswer, TextSpan
from tests.support.reports.sample_reports import (
    COMPARED,
    PIECES,
    as_json,
    build_sample_report,
    described,
    from_json,
    measured,
    measured_target,
    printed,
    with_modes,
)

DOCS = (Path(__file__).parents[3] / "docs/report.md").read_text()


@pytest.fixture(scope="module")
def bare():
    """Return a report of a draft of which only whole rounds were measured."""
    keys = ("autoregressive", "ngram", "a/chain", "a/tree")
    mode = replace(measured(share=0.5, depth=3, nodes=3, round_s=0.012, seed=1), split=None)
    no_sections = {"batches": [], "samples": [], "training": []}
    return build_sample_report(dict.fromkeys(keys, mode), [described("a", **no_sections)])


@pytest.fixture(scope="module")
def report_page(report):
    return render_page(report)


@pytest.fixture(scope="module")
def comparison_page(comparison):
    return render_page(comparison)


def get_column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def test_every_mode_is_in_the_page_and_in_the_text(report, comparison, report_page, comparison_page):
    for shown, html in ((report, report_page), (comparison, comparison_page)):
        text = render_markdown(shown)
        for view in list_modes(shown):
            assert f'<td class="label">{escape(view.label)}</td>' in html
            assert f"| {view.label} |" in text


def test_the_page_needs_nothing_from_outside(report_page, comparison_page, bare):
    for html, plots in ((report_page, 2), (comparison_page, 3), (render_page(bare), 1)):
        assert "http" not in html
        assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
        assert html.count("<svg") == html.count("</svg>") == plots
        assert "color-scheme: light dark" in html


def test_text_from_outside_is_escaped_in_the_page(report):
    strange = "a <script> & b"
    sample = SampleAnswer(prompt_id=strange, pieces=[TextSpan(text=strange, kind="accepted")])
    setup = replace(report.setup, command=strange)
    html = render_page(replace(report, setup=setup, drafts=[described("eagle3-demo", samples=[sample])]))
    assert "<script" not in html
    assert html.count(escape(strange)) >= 3


def test_every_figure_of_every_table_is_defined_and_nothing_else(report, comparison):
    shown = build_tables(report) + build_tables(comparison)
    for table in shown:
        assert set(table.columns[table.label_columns :]) <= set(DEFINITIONS), table.title
    assert collect_definitions(shown) == DEFINITIONS


def test_definitions_are_on_hover_under_the_tables_and_in_the_docs(report, report_page):
    text = render_markdown(report)
    for word, meaning in collect_definitions(build_tables(report)).items():
        assert f'title="{escape(meaning)}"' in report_page
        assert f">{escape(word)}</dt><dd>{escape(meaning)}.</dd>" in report_page
        assert f"- **{word}**: {meaning}." in text
    anchors = re.findall(r'href="#(is-[^"]*)"', report_page)
    assert anchors
    assert all(report_page.count(f'id="{anchor}"') == 1 for anchor in anchors)
    for word, meaning in DEFINITIONS.items():
        assert f"| {word} | {meaning} |" in DOCS


def test_the_parts_of_a_round_are_shown_with_their_bottleneck_below(report, report_page):
    table = split_table(report)
    assert get_column(table, "mode") == ["autoregressive", "ngram", "untrained", "chain", "tree"]
    names = [part.replace("_", " ") for part in PHASES]
    assert [get_column(table, name)[-1] for name in names] == ["12.30", "0.40", "0.30", "2.00", "0.20"]
    for name, value in (("round", "15.20"), ("fused round", "14.00")):
        assert get_column(table, name)[-1] == value
    figures = report.overall.modes["eagle3-demo/tree"].figures
    for name, figure in (("predicted", figures.predicted_speedup), ("efficiency", figures.efficiency)):
        assert get_column(table, name)[-1] == f"{figure:.2f}"
        assert get_column(table, name)[0] == ABSENT  # autoregressive decoding has no costs of its own
    for sentence in table.footnotes:
        assert escape(sentence) in report_page


def test_the_tuned_mode_is_named_in_the_first_lines_and_shown_as_the_others(report, report_page):
    modes = report.overall.modes
    drafts = [replace(report.drafts[0], tuned_tree="chain of 5")]
    tuned = with_modes(replace(report, drafts=drafts), modes | {"eagle3-demo/tuned": modes["eagle3-demo/chain"]})
    assert "tuned" in get_column(summary_table(tuned), "mode")
    speedup = modes["eagle3-demo/chain"].figures.speedup
    text = "Tuned for this device on other prompts: eagle3-demo chain of 5 (speed-up "
    text += f"{speedup.mean:.2f} ["
    assert text in render_page(tuned)
    assert text in render_markdown(tuned)
    assert "eagle3-demo, tuned to chain of 5: " in printed(tuned)
    assert "Tuned" not in report_page


def test_speed_against_batch_size_begins_with_one_row(report, comparison):
    table = batch_table(report)
    assert get_column(table, "batch") == ["1", "4", "16"]
    tree = report.overall.modes["eagle3-demo/tree"].figures
    assert get_column(table, "speed-up")[0].startswith(f"{tree.speedup.mean:.2f} [")
    assert get_column(table, "speed-up")[1:] == ["2.00 [1.80, 2.30]", "1.25 [1.05, 1.55]"]
    # A draft with a target of its own is compared with that, alone too.
    own = comparison.overall.modes["runs/adapted/autoregressive"].figures.tokens_per_s.mean
    assert get_column(batch_table(comparison), "autoregressive tokens/s")[3] == f"{own:.1f}"


def test_undecided_verdicts_say_what_decides_them(report, report_page):
    content = as_json(report)
    tree = content["overall"]["modes"]["eagle3-demo/tree"]
    for section in (tree, *content["drafts"][0]["batches"]):
        section["verdict"].update(lossless="undecided", near_tie_gap=3.0, explained_gap=0.5)
    content["setup"]["device"]["dtype"] = "bfloat16"
    undecided = from_json(content)
    assert get_column(summary_table(undecided), "lossless")[3:5] == ["yes", "undecided"]
    assert get_column(exactness_table(undecided), "explained gap")[-1] == "0.5"
    assert get_column(batch_table(undecided), "lossless") == ["undecided"] * 3
    sentence = (
        "undecided: a near-tie gap of 3 logits is wider than the 0.5 that bfloat16 explains in "
        "this target; decode with device.precision=float32."
    )
    for text in (render_page(undecided), render_markdown(undecided), printed(undecided)):
        assert sentence in " ".join(text.split())
    assert sentence not in report_page


def test_sections_without_measurements_are_left_out(bare):
    for text in (render_page(bare), render_markdown(bare), printed(bare)):
        for title in ("batch size", "Where a round's time goes", "Sample answers", "evaluations"):
            assert title not in unescape(text)


def test_ratio_rules_are_exact_in_distribution_and_not_compared(report):
    content = as_json(report)
    for mode, rule in (("chain", "block"), ("tree", "rejection")):
        content["overall"]["modes"][f"eagle3-demo/{mode}"]["verdict"]["verification"] = rule
    other = from_json(content)
    assert get_column(summary_table(other), "lossless")[3:5] == ["in distribution"] * 2
    for row in exactness_table(other).rows[-2:]:
        assert row[1:] == ["in distribution", *[ABSENT] * 5]
    assert "verification: greedy, block and rejection" in render_page(other)


def test_sample_answers_show_who_wrote_each_piece_and_keep_their_white_space(report, report_page, comparison_page):
    for kind, text in PIECES.items():
        assert f'<span class="{kind}">{escape(text)}</span>' in report_page
        assert f'<span class="{kind}">{escape(KIND_LEGEND[kind])}</span>' in report_page
        assert f".{kind} {{" in report_page
    assert "white-space: pre-wrap" in report_page
    accepted = report_page[report_page.index(".accepted {") :]
    assert "underline" in accepted[: accepted.index("}")]  # not by color alone
    assert comparison_page.count("<details") == len(COMPARED)
    long = SampleAnswer(prompt_id="a", pieces=[TextSpan(text="x" * 9999, kind="prompt")])
    shortened = render_page(replace(report, drafts=[described("eagle3-demo", samples=[long])]))
    assert "x" * 401 not in shortened


def report_categories(*categories: str):
    """Return a report of a target on 48 prompts, to which these categories are dealt."""
    results = {
        key: replace(
            mode,
            prompt_results=[
                replace(r, prompt=replace(r.prompt, category=categories[i % len(categories)]))
                for i, r in enumerate(mode.prompt_results)
            ],
        )
        for key, mode in measured_target().items()
    }
    return build_sample_report(results)


@pytest.mark.parametrize("category", ["all", "chat"])
def test_a_single_category_is_not_shown_twice(category):
    report = report_categories(category)
    for table in (overview_table(report), summary_table(report)):
        assert [row[:2] for row in table.rows] == [["all (48)", mode] for mode in ("autoregressive", "ngram")]
    assert "48 held-out prompts (" in build_headline(report)


@pytest.mark.parametrize("categories", [("all", "code"), ("code", "all", "docs")])
def test_prompts_without_a_category_are_not_shown_as_all_prompts(categories):
    names = {row[0] for row in summary_table(report_categories(*categories)).rows}
    each = 48 // len(categories)
    own = {f"{name} ({each})" for name in categories if name != "all"}
    assert names == {"all (48)", f"other ({each})"} | own


def test_a_category_may_be_called_other_beside_prompts_without_any():
    names = {row[0] for row in summary_table(report_categories("all", "other")).rows}
    assert names == {"all (48)", "without category (24)", "other (24)"}


def test_drafts_are_shown_side_by_side_first(report, comparison, comparison_page):
    for text in (comparison_page, render_markdown(comparison)):
        assert text.index("Drafts side by side") < text.index("Modes by category")
    assert all(name in " ".join(printed(comparison).split()) for name in COMPARED[:2])
    table = build_tables(comparison)[0]
    assert [row[0] for row in table.rows] == ["autoregressive", "n-gram lookup", *COMPARED]
    row = dict(zip(table.columns, table.rows[2], strict=True))
    assert (row["M params"], row["MB"]) == ("0.46", "1.89")  # weights and state together
    assert (row["draft ms"], row["verify ms"]) == ("2.00", "13.00")
    chain, tree = (comparison.overall.modes[f"usual/{name}"] for name in ("chain", "tree"))
    for name, mode in (("chain tau", chain), ("tree tau", tree)):
        assert row[name] == f"{mode.figures.acceptance_length.mean:.2f}"
    assert row["speed-up"].startswith(f"{tree.figures.speedup.mean:.2f} [")
    assert [row[-1] for row in table.rows[2:]] == ["yes", "yes (own)", "no (typical)"]
    assert build_tables(report)[0].title == "Modes by category"  # a single draft is compared with no other


def test_the_first_plot_shows_speed_up_against_acceptance_length_and_names_every_draft(report, comparison):
    title, svg = next(iter(render_plots(comparison).items()))
    assert title == "Speed-up against acceptance length"
    for name in ("usual", "runs/adapted (own target)", "a-run-with-a-long-name", "n-gram lookup"):
        assert f">{name}</text>" in svg
    assert title not in render_plots(report)


def test_plots_show_the_tree_of_each_of_several_drafts_or_all_modes_of_a_single_draft(report, comparison):
    several, single_draft = (render_plots(shown)["Acceptance by position"] for shown in (comparison, report))
    for name in COMPARED:
        assert f">{name} tree</text>" in several
        assert f">{name} chain</text>" not in several
    assert ">chain</text>" in single_draft


def test_eight_drafts_have_a_color_each(report):
    eight, nine = (replace(report, drafts=report.drafts * count) for count in (8, 9))
    assert len({color for color, _ in assign_draft_colors(eight)}) == 8
    assert len(assign_draft_colors(nine)) == 9


def test_terminal_output_is_plain_and_fits_a_hundred_columns(report, bare, comparison):
    for shown in (report, bare, comparison):
        text = printed(shown)
        assert max(map(len, text.splitlines())) <= 100
        assert text.isascii()
