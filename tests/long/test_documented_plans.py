"""The plans of docs/trainium.md fit their machines, and take the memory that the page's table has."""

import re

import pytest

from tests.support.commands.pages import ROOT, Command, code, commands
from train.planning.run_plan import plan_run

PAGE = (ROOT / "docs/trainium.md").read_text()
TABLE = re.compile(r"^\| (\S+) on (\S+) \| .*\| ([\d.]+) \| [\d.]+ of \d+ \|$", re.MULTILINE)
PEAK_GIB = {(draft, machine): float(peak) for draft, machine, peak in TABLE.findall(PAGE)}


def list_plans() -> list[Command]:
    return list({command: None for command in commands(code(PAGE)) if command.module == "train.plan"})


@pytest.mark.slow
@pytest.mark.parametrize("command", list_plans(), ids=lambda command: " ".join(command.words[:2]))
def test_a_documented_plan_fits_in_the_memory_of_the_table(command):
    (conf,) = command.configs()
    plan = plan_run(conf)
    assert plan.fits(plan.best)
    key = tuple(word.partition("=")[2] for word in command.words[:2])
    assert plan.best.peak_bytes / 2**30 == pytest.approx(PEAK_GIB[key], abs=0.05)


def test_every_row_of_the_table_is_planned_by_a_command():
    assert PEAK_GIB.keys() == {tuple(word.partition("=")[2] for word in plan.words[:2]) for plan in list_plans()}
