"""The plans of docs/trainium.md and docs/planning.md fit their machines, and take the memory of the pages' tables."""

import re

import pytest

from conf.entry import compose
from tests.support.commands.pages import ROOT, code, commands
from train.config.run import TrainPlanConf
from train.planning.choice import plan_run

TRAINIUM, PLANNING = ((ROOT / "docs" / name).read_text() for name in ("trainium.md", "planning.md"))
TABLE = re.compile(r"^\| (\S+) on (\S+) \| .*\| ([\d.]+) \| [\d.]+ of \d+ \|$", re.MULTILINE)
PEAK_GIB = {(draft, machine): float(peak) for draft, machine, peak in TABLE.findall(TRAINIUM)}
COMMANDS = {
    tuple(word.partition("=")[2] for word in command.words[:2]): [*command.words]
    for command in commands(code(TRAINIUM))
    if command.module == "train.plan"
}
PLANS = [(words, PEAK_GIB.get(key)) for key, words in COMMANDS.items()] + [
    (words.split(), float(peak))
    for words, peak in re.findall(r"^\| `(draft=[^`]+)` \| [^|]*\| ([\d.]+) \|", PLANNING, re.MULTILINE)
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "peak"), PLANS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_documented_plan_fits_in_the_memory_of_the_table(words, peak):
    plan = plan_run(compose("train_plan", TrainPlanConf, words))
    assert plan.fits(plan.best)
    assert plan.best.peak_bytes / 2**30 == pytest.approx(peak, abs=0.05)


def test_every_row_of_the_table_is_planned_by_a_command():
    assert PEAK_GIB.keys() == COMMANDS.keys()
    assert len(PLANS) > len(COMMANDS)
