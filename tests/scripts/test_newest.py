"""scripts/newest.py lifts upper bounds alone, and writes each result to its row of the page."""

import pytest

from scripts.newest import ROOT, lift_bounds, note_result

WITHIN_BOUNDS, NO_BOUNDS = "| the newest versions within the bounds:", "| the newest versions of all:"
ROWS = f"{WITHIN_BOUNDS} torch 1 | CPU | x |\n{NO_BOUNDS} | - | y |\n"


def test_only_upper_bounds_are_lifted():
    pyproject = {
        "project": {"dependencies": ["torch>=2.9,<2.15", "omegaconf<2.4,>=2.3", "numpy>=2", "rich<16"]},
        "dependency-groups": {"dev": ["pyright[nodejs]>=1.1.400,<2"]},
    }
    assert lift_bounds(pyproject) == ["torch>=2.9", "omegaconf>=2.3", "numpy>=2", "rich", "pyright[nodejs]>=1.1.400"]


def test_a_result_replaces_the_row_of_its_bounds_alone():
    page = note_result(ROWS, "passed", "kept", {"torch": "2.14.1"}, "CPU")
    assert page == f"{WITHIN_BOUNDS} torch 2.14.1 | CPU: **passed** | `make test-newest` |\n{NO_BOUNDS} | - | y |\n"
    page = note_result(ROWS, "failed", "none", {"torch": "2.15.0"}, "CPU")
    assert page == (
        f"{WITHIN_BOUNDS} torch 1 | CPU | x |\n"
        f"{NO_BOUNDS} torch 2.15.0 | CPU: **failed** | `make test-newest BOUNDS=none` |\n"
    )


def test_the_page_has_both_rows():
    page = (ROOT / "docs/status.md").read_text()
    for bounds in ("kept", "none"):
        assert "**failed**" in note_result(page, "failed", bounds, {}, "CPU")


def test_a_page_without_the_row_is_refused():
    with pytest.raises(ValueError, match=r"one row of the newest versions of all, got 0"):
        note_result("| torch |\n", "passed", "none", {}, "CPU")
