"""Several drafts in one report: what is compared with what, and what is said of it."""

from dataclasses import replace
from html import unescape

import pytest

from infer.measure.intervals import Estimate
from infer.measure.records import Exactness
from infer.measure.report_schema import AdaptedTargetInfo, LosslessVerdict
from infer.report.plots import render_plots
from infer.report.prose import build_headline
from infer.report.report_files import write_report_files
from infer.report.tables import build_tables
from infer.report.views import assign_draft_colors
from tests.support.made_report import COMPARED, printed

ADAPTED = (
    "runs/adapted is compared with its own adapted target, whose answers differ from the "
    "original's on 5 of 48 prompts."
)
LOSSY = "are verified by the typical rule, which is lossy: their answers are not the target's."


def test_a_draft_with_its_own_target_is_compared_with_that(comparison):
    usual, adapted, _ = comparison.drafts
    assert usual.target is None
    assert "autoregressive" not in usual.modes
    assert adapted.target == AdaptedTargetInfo(
        name="demo adapted", parameters=3_500_000, adapted_from="demo", changed_answers=5
    )
    own, tree = adapted.modes["autoregressive"], adapted.modes["tree"]
    speeds = [mode.tokens_per_s.mean for mode in (tree, own, comparison.autoregressive)]
    assert tree.speedup.mean == pytest.approx(speeds[0] / speeds[1])
    assert speeds[1] > 1.1 * speeds[2]  # the two baselines differ, so it matters which
    assert own.speedup == Estimate(mean=1.0, ci95=[1.0, 1.0])
    assert adapted.gain["tree"]["over_ngram"]["speedup"].mean == pytest.approx(
        tree.speedup.mean - comparison.ngram.speedup.mean
    )
    assert [
        category.drafts[1].target.changed_answers for category in comparison.categories.values()
    ] == [5, 0, 0, 0]  # the first twelve prompts are of the first category


def test_lossy_verification_is_never_called_lossless(comparison):
    lossy = comparison.drafts[2].modes
    assert {mode.verification for mode in lossy.values()} == {"typical"}
    assert all(mode.lossy and mode.lossless == "no" for mode in lossy.values())
    for exact in (comparison.autoregressive, comparison.ngram):
        assert (exact.verification, exact.lossless) == ("exact", "yes")


def test_what_forbids_comparing_is_said_in_words(report, comparison, tmp_path):
    write_report_files(comparison, tmp_path)
    html = unescape((tmp_path / "report.html").read_text())
    for said in (build_headline(comparison), (tmp_path / "report.md").read_text(), html):
        assert ADAPTED in said
        assert LOSSY in said
    shown = " ".join(printed(comparison).split())
    assert ADAPTED in shown
    assert LOSSY in shown
    assert "no (typical)" in shown
    assert "rule" not in build_headline(report)
    assert "adapted" not in build_headline(report)


def test_drafts_are_shown_side_by_side_first(report, comparison, tmp_path):
    write_report_files(comparison, tmp_path)
    html, text = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    for said in (html, text):
        assert said.index("Drafts side by side") < said.index("Modes by category")
    assert all(name in printed(comparison) for name in COMPARED)
    table = build_tables(comparison)[0]
    assert [row[0] for row in table.rows] == ["autoregressive", "n-gram lookup", *COMPARED]
    row = dict(zip(table.columns, table.rows[2], strict=True))
    assert (row["M params"], row["MB"]) == ("0.46", "1.89")  # weights and state together
    assert (row["draft ms"], row["verify ms"]) == ("2.00", "13.00")
    modes = comparison.drafts[0].modes
    for column, mode in (("chain tau", modes["chain"]), ("tree tau", modes["tree"])):
        assert row[column] == f"{mode.acceptance_length.mean:.2f}"
    assert row["speed-up"].startswith(f"{modes['tree'].speedup.mean:.2f} [")
    assert [row[-1] for row in table.rows[2:]] == ["yes", "yes (own)", "no (typical)"]
    assert build_tables(report)[0].title == "Modes by category"  # one draft has nobody beside it


def test_the_first_picture_is_the_one_to_choose_by_and_names_every_draft(report, comparison):
    title, svg = next(iter(render_plots(comparison).items()))
    assert title == "Speed-up against acceptance length"
    for name in ("usual", "runs/adapted (own target)", "a-run-with-a-long-name", "n-gram lookup"):
        assert f">{name}</text>" in svg
    assert title not in render_plots(report)


def test_plots_of_several_drafts_show_their_trees(report, comparison):
    curve = "Acceptance length over tokens seen"  # of training, which has no modes
    for title, svg in list(render_plots(comparison).items())[1:]:
        for name in COMPARED if title != curve else ():
            assert f">{name} tree</text>" in svg, title
            assert f">{name} chain</text>" not in svg, title
    alone = render_plots(report)
    del alone["Speed-up against batch size"], alone[curve]  # the former is of trees in any case
    assert all(">chain</text>" in svg for svg in alone.values())


def test_eight_drafts_have_a_colour_each(report):
    eight, nine = (replace(report, drafts=report.drafts * count) for count in (8, 9))
    assert len(set(assign_draft_colors(eight))) == 8
    assert len(assign_draft_colors(nine)) == 9


def test_a_rule_is_lossy_by_its_proof_not_by_its_name():
    lossy = {name for name in ("exact", "greedy", "coupled", "rejection", "block", "typical")
             if Exactness().judge(name).lossy}  # fmt: skip
    assert lossy == {"typical"}
    assert Exactness().judge("block").lossless == LosslessVerdict.yes
