"""The plans of docs/trainium.md and docs/planning.md fit their machines, and take the memory of the pages' tables."""

import re

import pytest

from conf.entry import compose
from tests.support.commands.pages import ROOT, code, commands
from train.config.run import TrainPlanConf
from train.planning.choice import plan_run
from train.planning.remedies import suggest_overrides

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


@pytest.mark.slow
def test_a_chip_that_no_layout_fits_is_told_to_learn_from_a_store_of_full_rows():
    """With split heads the run would fit by rows of 1,280 tokens, which change what is learned."""
    words = ["draft=qwen3-32b-eagle3", "machine=trn2.3xlarge"]
    changes = suggest_overrides(plan_run(compose("train_plan", TrainPlanConf, words)))
    assert changes == ["data=captured", "measure=false", "parallel.draft=sharded"]


def test_every_row_of_the_table_is_planned_by_a_command():
    assert PEAK_GIB.keys() == COMMANDS.keys()
    assert len(PLANS) > len(COMMANDS)
