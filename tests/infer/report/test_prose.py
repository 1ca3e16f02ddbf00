"""The sentences of a report never promise what was not measured."""

from dataclasses import replace
from html import unescape

import pytest

from data.eval_prompts.contamination import Contamination
from infer.report.prose import (
    build_headline,
    describe_bottlenecks,
    describe_contamination,
    describe_verdicts,
    list_absences,
)
from infer.report.report_files import render_page
from infer.report.tables import render_markdown
from infer.results.schema import LosslessVerdict
from tests.support.reports.sample_reports import build_sample_report, described, measured, printed, with_mode

TREE = "eagle3-demo/tree"
ADAPTED = (
    "runs/adapted is compared with its own adapted target, whose answers differ from the original's on 5 of 48 prompts."
)
LOSSY = "are verified by the typical rule, which is lossy: their answers are not the target's."


def test_a_terminal_shows_the_verdict_first_and_fits_a_screen(report):
    verdict, *_ = printed(report).replace("\n", " ").split(". ")
    figures = report.overall.modes[TREE].figures
    assert f"{figures.delivered_per_round.mean:.2f} tokens delivered per round" in verdict
    assert f"{figures.speedup.mean:.2f} [" in verdict
    assert len(printed(report).splitlines()) <= 24


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lossless": LosslessVerdict.yes, "mismatched_prompts": 0}, "same output."),
        ({"lossless": LosslessVerdict.yes, "mismatched_prompts": 2}, "same output (2 of 48"),
        ({"lossless": LosslessVerdict.undecided, "mismatched_prompts": 2}, "output undecided: 2"),
        ({"lossless": LosslessVerdict.no, "mismatched_prompts": 9}, "NOT the same output: 9 of"),
        ({"lossy": True, "verification": "typical"}, "other output, as the typical rule is lossy"),
        ({"verification": "rejection"}, "output of the same distribution."),
    ],
)
def test_a_verdict_never_calls_other_output_the_same(report, changes, expected):
    (verdict,) = describe_verdicts(with_mode(report, TREE, **changes))
    assert expected in verdict


def test_every_form_of_a_report_names_the_reasons_that_forbid_comparing(report, comparison):
    texts = (build_headline(comparison), render_markdown(comparison), render_page(comparison))
    for text in (*texts, printed(comparison)):
        plain = " ".join(unescape(text).split())
        assert ADAPTED in plain
        assert LOSSY in plain
    assert "no (typical)" in printed(comparison)
    assert "rule" not in build_headline(report)
    assert "adapted" not in build_headline(report)


def test_prompts_in_the_training_data_are_reported_in_one_line_for_each_result(report, comparison):
    (line,) = describe_contamination(report)
    assert line == "eagle3-demo: 1 of the 48 held-out prompts is in the training data (docs-2)."
    first, second = describe_contamination(comparison)
    assert first.startswith("usual, runs/adapted: 1 of the 48")
    assert second.startswith("a-run-with-a-long-name: not checked for held-out prompts in the")
    prompts = replace(report.setup.prompts, contamination={"a": Contamination(checked=True)})
    clean = replace(report, setup=replace(report.setup, prompts=prompts))
    assert describe_contamination(clean) == ["a: none of the 48 held-out prompts is in the training data."]


@pytest.mark.parametrize(
    ("rendered", "how"),
    [(0, "as plain text"), (5, "5 of them through the chat template"), (48, "through the chat template")],
)
def test_the_headline_says_where_the_prompts_come_from(rendered, how):
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1, rendered=rendered)
    report = build_sample_report({"autoregressive": plain, "ngram": plain}, source="chat.jsonl")
    text = f"48 held-out prompts in 4 categories (held out from chat.jsonl; {how}) were continued"
    assert text in build_headline(report)
    assert report.setup.prompts.source == "held out from chat.jsonl"


def test_the_headline_counts_graphs_only_where_some_are_compiled(report):
    assert ", compiled, 0 graphs after the warm-up)" in build_headline(report)
    eager = replace(report, setup=replace(report.setup, graphs_after_warmup=None))
    assert ", not compiled)" in build_headline(eager)


def test_a_mode_that_was_not_measured_is_named_with_its_reason(report):
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1)
    untimed = replace(plain, split=None)
    reason = {"untrained": "the checkpoint holds no config"}
    keys = ("autoregressive", "ngram", "a/chain", "a/tree")
    missing = build_sample_report(dict.fromkeys(keys, untimed), [described("a", not_measured=reason)])
    assert list_absences(missing) == [
        "untrained: not measured: the checkpoint holds no config",
        "parts of a round: not measured: evaluation.phases=true times them",
    ]
    assert "not measured" not in " ".join(list_absences(report))


def test_the_bottleneck_is_the_largest_extra_cost_of_a_round(report, comparison):
    """The tree's rounds of 15 ms verify for 12.3 ms, whereas a step of the target takes 10 ms."""
    (tree,) = [line for line in describe_bottlenecks(report) if line.startswith("tree: ")]
    tau = report.overall.modes[TREE].figures.acceptance_length.mean
    assert tree == (
        f"tree: Verifying more than one token limits the speed-up most: a round yields {tau:.2f} "
        "tokens and costs one autoregressive step plus 0.27 steps for this; other extra costs, in "
        "steps: drafting 0.20, moving the cache 0.03, the host 0.02, accepting 0.00."
    )
    assert [line.partition(":")[0] for line in describe_bottlenecks(comparison)][1:] == [
        "usual tree",
        "runs/adapted tree",
        "a-run-with-a-long-name tree",
    ]
