"""The curve of tau over tokens is read from the run's metrics, judged by its trend, and extrapolated."""

import json
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from infer.report.prose import describe_curve, describe_training
from infer.report.report_files import render_page
from infer.report.tables import render_markdown
from infer.results.curve import Trend, fit_rise, predict_tau, read_curve
from infer.results.schema import CurvePoint
from tests.support.reports.sample_reports import COMPARED, curve, printed

RISING = (
    "tau still rises: +1.0 [+0.87, +1.1] a million tokens over the last 5 of 10 evaluations, up to "
    "1,000,000 tokens; at twice the tokens about 3.53 ["
)


def replace_curve(report, points):
    return replace(report, drafts=[replace(report.drafts[0], training=points)])


def write_metrics(folder, lines, *, partial_line=""):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + partial_line)
    return folder / "checkpoint"


def test_the_curve_has_a_point_for_each_evaluation_of_the_run(tmp_path):
    lines = [
        {"step": 10, "train/tokens": 100.0},  # a log line between two evaluations
        {"step": 20, "train/tokens": 200.0, "eval/acceptance_length": 1.5},
        {"step": 40, "train/tokens": 400.0, "eval/acceptance_length": 1.75},
    ]
    measured = [CurvePoint(tokens=200, tau=1.5), CurvePoint(tokens=400, tau=1.75)]
    assert read_curve(write_metrics(tmp_path, lines)) == measured
    assert read_curve(write_metrics(tmp_path, lines, partial_line='{"step": 60, "tr')) == measured
    assert read_curve(tmp_path / "elsewhere" / "checkpoint") == []


@pytest.mark.parametrize(
    ("points", "trend"),
    [
        (curve(), Trend.rising),
        (curve(rise=0.0), Trend.flat),
        (curve(rise=0.02, noise=0.1), Trend.flat),  # it rises by less than its noise
        (curve(rise=-0.1), Trend.falling),
        (
            [*curve(5), *(replace(p, tokens=p.tokens + 500_000) for p in curve(5, rise=0.0))],
            Trend.flat,
        ),  # only the last half counts
    ],
)
def test_a_curve_rises_only_if_its_last_half_does_beyond_its_noise(points, trend):
    line = fit_rise(points)
    assert line is not None
    assert Trend.from_slope(line.slope) is trend
    assert describe_curve(points).startswith(f"tau {trend.value}: ")
    assert ("at twice the tokens" in describe_curve(points)) == (trend is Trend.rising)


@pytest.mark.parametrize("count", [0, 1, 6])
def test_a_short_curve_is_not_judged(count):
    assert fit_rise(curve(count)) is None
    assert predict_tau(curve(count), 10**6) is None
    too_few = f"too few evaluations to tell whether tau still rises: {count}, and 7 are needed"
    assert describe_curve(curve(count)).startswith(too_few)
    assert fit_rise(curve(7)) is not None


def test_a_prediction_holds_the_longer_run_19_times_of_20():
    """The curves gain as much at each doubling, with the noise of a few prompts."""
    rng, hits, repeats = np.random.default_rng(0), 0, 400
    tokens = [100_000 * n for n in range(1, 21)]
    for _ in range(repeats):
        taus = 1.5 + 0.2 * np.log([*tokens, 4_000_000]) + rng.normal(0, 0.05, 21)
        points = [CurvePoint(tokens=t, tau=tau) for t, tau in zip(tokens, taus[:-1], strict=True)]
        predicted = predict_tau(points, 4_000_000)
        assert predicted is not None
        assert predicted.ci95 is not None
        hits += predicted.ci95[0] <= taus[-1] <= predicted.ci95[1]
    assert 0.92 <= hits / repeats <= 0.98


def test_every_form_of_the_report_says_whether_more_training_pays(report, comparison):
    (line,) = describe_training(report)
    assert line.startswith(f"eagle3-demo: {RISING}")
    for text in (render_markdown(report), unescape(render_page(report))):
        assert line in text
    assert " ".join(printed(report).split()).endswith(line)  # the last words of a training
    assert [text.partition(":")[0] for text in describe_training(comparison)] == list(COMPARED)


def test_the_curve_is_drawn_with_its_fitted_line(report):
    title, fitted = "Acceptance length over tokens seen", "least squares, last half"
    page = render_page(report)
    figure = page[page.index(f"<figcaption>{title}") :]
    assert "million tokens seen" in figure
    assert fitted in figure
    short = replace_curve(report, curve(3))
    assert title in render_page(short)
    assert fitted not in render_page(short)
    without = replace_curve(report, [])
    assert title not in render_page(without)
    assert "evaluations" not in render_markdown(without)
