"""The terminal begins with a sentence on each draft, and never calls other output the same."""

from dataclasses import replace

from infer.measure.report_schema import LosslessVerdict
from infer.report.prose import describe_verdicts
from tests.support.made_report import printed


def test_a_terminal_shows_the_verdict_first_and_fits_a_screen(report):
    verdict, *_ = printed(report).replace("\n", " ").split(". ")
    assert "tokens delivered per round" in verdict
    mode = report.drafts[0].modes["tree"]
    assert f"{mode.delivered_per_round.mean:.2f} tokens" in verdict
    assert f"{mode.speedup.mean:.2f} [" in verdict
    assert len(printed(report).splitlines()) <= 24


def test_a_verdict_never_calls_other_output_the_same(report):
    tree = report.drafts[0].modes["tree"]
    for changes, expected in (
        ({"lossless": LosslessVerdict.yes, "mismatched_prompts": 0}, "same output."),
        ({"lossless": LosslessVerdict.yes, "mismatched_prompts": 2}, "same output (2 of 48"),
        ({"lossless": LosslessVerdict.undecided, "mismatched_prompts": 2}, "output undecided: 2"),
        ({"lossless": LosslessVerdict.no, "mismatched_prompts": 9}, "NOT the same output: 9 of"),
        ({"lossy": True, "verification": "typical"}, "other output, as the typical rule is lossy"),
        ({"verification": "rejection"}, "output of the same distribution."),
    ):
        draft = replace(report.drafts[0], modes={"tree": replace(tree, **changes)})
        (verdict,) = describe_verdicts(replace(report, drafts=[draft]))
        assert expected in verdict
