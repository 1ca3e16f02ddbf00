"""The page of a device has counts, a table for each stage and the remedies of what failed."""

import json
from dataclasses import asdict

import pytest

from train.device.checks import Outcome
from train.device.page import MEANING, render_page, write_page


def build_outcome(stage: str, name: str, result: str, detail: str = "", remedy: str = "") -> Outcome:
    return Outcome(stage=stage, name=name, result=result, seconds=1.26, detail=detail, remedy=remedy)


@pytest.fixture
def outcomes() -> list[Outcome]:
    return [
        build_outcome("place", "versions", "PASS", "torch 2 | Python 3"),
        build_outcome("place", "cache", "SKIP", "no folder"),
        build_outcome("operators", "argmax", "FAIL", "3 values differ", "report it"),
        build_outcome("operators", "sort", "ABSENT", "RuntimeError: no sort"),
        build_outcome("operators", "gather", "PASS", "equal"),
    ]


def test_each_stage_has_a_table_of_its_checks_and_the_remedies_of_what_failed(outcomes):
    head, place, operators = render_page(outcomes, "neuron").split("\n## ")
    assert head.startswith("# The device neuron\n\n`python -m train.device device=neuron`, ")
    assert head.rstrip().endswith(": 2 PASS, 1 FAIL, 1 ABSENT, 1 SKIP.")
    assert place.splitlines() == [
        "Place",
        "",
        "| check | result | seconds | measured |",
        "| --- | --- | ---: | ---: |",
        r"| versions | PASS | 1.3 | torch 2 \| Python 3 |",
        "| cache | SKIP | 1.3 | no folder |",
    ]
    assert operators.splitlines() == [
        "Operators",
        "",
        "| check | result | seconds | measured |",
        "| --- | --- | ---: | ---: |",
        "| argmax | FAIL | 1.3 | 3 values differ |",
        "| sort | ABSENT | 1.3 | RuntimeError: no sort |",
        "| gather | PASS | 1.3 | equal |",
        "",
        "* argmax: report it",
        "",
        MEANING,
    ]


def test_the_file_in_json_equals_the_outcomes(outcomes, tmp_path):
    page = write_page(outcomes, "neuron", tmp_path / "new" / "folder")
    assert page == tmp_path / "new" / "folder" / "neuron.md"
    assert page.read_text() == render_page(outcomes, "neuron")
    written = json.loads(page.with_suffix(".json").read_text())
    assert written == [asdict(outcome) for outcome in outcomes]
    assert [Outcome(**line) for line in written] == outcomes
