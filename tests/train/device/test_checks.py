"""Whatever becomes of a check is an outcome, and the file of outcomes tells which check has not ended."""

import pytest

from models.io.errors import UserError
from train.device.checks import (
    MAX_DETAIL,
    Check,
    CheckFailedError,
    CheckSkippedError,
    Outcome,
    OutcomeFile,
    format_outcome,
    run_check,
    run_checks,
)

REMEDY = "another device"


@pytest.fixture
def file(tmp_path) -> OutcomeFile:
    return OutcomeFile(tmp_path / "outcomes.jsonl")


def build_check(error: Exception | None = None, *, name: str = "sum", is_needed: bool = True) -> Check:
    def run() -> str:
        if error is not None:
            raise error
        return "equal"

    return Check(name=name, run=run, remedy=REMEDY, is_needed=is_needed)


@pytest.mark.parametrize(
    ("error", "is_needed", "result", "detail", "remedy"),
    [
        (None, True, "PASS", "equal", ""),
        (None, False, "PASS", "equal", ""),
        (CheckFailedError("3 values\ndiffer"), True, "FAIL", "3 values differ", REMEDY),
        (RuntimeError("no such operator"), True, "FAIL", "RuntimeError: no such operator", REMEDY),
        (UserError("device: is absent"), True, "FAIL", "UserError: device: is absent", REMEDY),
        (RuntimeError("no such operator"), False, "ABSENT", "RuntimeError: no such operator", ""),
        (CheckFailedError("3 values differ"), False, "ABSENT", "3 values differ", ""),
        (CheckSkippedError("a single device"), True, "SKIP", "a single device", ""),
        (CheckSkippedError("a single device"), False, "SKIP", "a single device", ""),
    ],
)
def test_what_a_check_raises_is_its_outcome_and_a_failure_has_the_remedy(error, is_needed, result, detail, remedy):
    outcome = run_check("operators", build_check(error, is_needed=is_needed))
    assert (outcome.result, outcome.detail, outcome.remedy) == (result, detail, remedy)
    assert (outcome.stage, outcome.name) == ("operators", "sum")


def test_a_long_error_is_cut():
    outcome = run_check("operators", build_check(CheckFailedError("x" * 2 * MAX_DETAIL)))
    assert outcome.detail == "x" * MAX_DETAIL


def test_a_failure_does_not_stop_the_checks_behind_it_and_no_check_runs_twice(file):
    run_checks("operators", [build_check(ValueError("wrong")), build_check(name="product")], file)
    run_checks("operators", [build_check(), build_check(ValueError("again"), name="product")], file)
    assert [(o.name, o.result) for o in file.read_outcomes()] == [("sum", "FAIL"), ("product", "PASS")]


def test_checks_of_other_stages_may_have_the_same_name(file):
    run_checks("operators", [build_check()], file)
    run_checks("functions", [build_check()], file)
    assert [o.stage for o in file.read_outcomes()] == ["operators", "functions"]


def test_after_the_deadline_checks_are_skipped_with_a_remedy(file, capsys):
    run_checks("operators", [build_check(ValueError("was begun")), build_check(name="product")], file, deadline=0.0)
    outcomes = file.read_outcomes()
    assert [(o.name, o.result) for o in outcomes] == [("sum", "SKIP"), ("product", "SKIP")]
    assert {o.detail for o in outcomes} == {"the stage's time was over"}
    assert {o.remedy for o in outcomes} == {"give it more: stages=[operators] minutes=60"}
    assert "remedy: give it more: stages=[operators] minutes=60" in capsys.readouterr().out


def test_a_check_that_has_not_ended_is_noticed(file):
    assert file.find_unfinished() is None
    run_checks("operators", [build_check()], file)
    assert file.find_unfinished() is None
    file.begin("operators", build_check(name="product"))
    assert file.find_unfinished() == ("operators", "product", REMEDY)
    assert [o.name for o in file.read_outcomes()] == ["sum"]
    file.end(run_check("operators", build_check(name="product")))
    assert file.find_unfinished() is None


def test_an_outcome_comes_back_equal(file):
    outcome = Outcome(stage="place", name="disk", result="FAIL", seconds=0.25, detail='"3" | [x]\n', remedy="a disk")
    file.end(outcome)
    assert file.read_outcomes() == [outcome]


def test_the_remedy_is_printed_below_a_failure():
    outcome = run_check("operators", build_check(CheckFailedError("3 values differ")))
    first, second = format_outcome(outcome).splitlines()
    assert first.startswith("FAIL ")
    assert first.endswith("operators: sum: 3 values differ")
    assert second.strip() == f"remedy: {REMEDY}"


def test_brackets_are_printed_as_they_are(file, capsys):
    file.end(Outcome(stage="place", name="disk", result="PASS", seconds=0.0, detail="shape [red] [4]"))
    assert "shape [red] [4]" in capsys.readouterr().out
