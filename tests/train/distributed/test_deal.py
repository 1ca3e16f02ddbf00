"""Members of a tensor group learn rows of their own, and no work is done twice."""

import json

import pytest

from tests.support.runs import launch_script
from tests.support.runs.parallel_run import run, save_target
from tests.system.test_parallel import read_losses, read_ranks

pytestmark = pytest.mark.system
PROCESSES = 4
RUNS = {
    "two rows each": {"rows_per_step": 8},
    "a row for every two": {"rows_per_step": 2},
    "rows of the draft and kept ones": {"rows_per_step": 8, "draft": "pruned", "drafted_share": 0.5},
    # A pass gathers the target's weights, so that all processes make it, whoever has rows of the draft.
    "rows of the draft and a sharded target": {
        "rows_per_step": 8,
        "draft": "pruned",
        "drafted_share": 0.5,
        "parallel": {"target": "sharded"},
    },
    "counted": {"rows_per_step": 8, "counts_products": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run four processes that share a target, whose vocabulary they cannot share evenly, and a single one."""
    folder = tmp_path_factory.mktemp("dealt")
    target = folder / "target"
    save_target(target, num_key_value_heads=4, vocab_size=33)
    runs = [{"folder": str(folder / name), "parallel": {"tensor": 4}, **options} for name, options in RUNS.items()]
    launch_script("parallel_run.py", target, json.dumps(runs), processes=PROCESSES)
    for name, options in RUNS.items():
        run(target, **options | {"folder": str(folder / f"{name} alone"), "parallel": {}})
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_members_that_learn_rows_of_their_own_learn_what_a_single_process_does(folder, name):
    assert read_losses(folder / name) == pytest.approx(read_losses(folder / f"{name} alone"), rel=1e-5)
    (alone,), together = read_ranks(folder / f"{name} alone"), read_ranks(folder / name)
    assert len({rank["draft"] for rank in together}) == 1
    for rank in together:
        assert rank["progress"] == alone["progress"]  # tokens among it


def test_a_member_does_its_share_of_the_products_of_the_draft(folder):
    (alone,), together = read_ranks(folder / "counted alone"), read_ranks(folder / "counted")
    for rank in together:
        assert rank["products"] == pytest.approx(alone["products"] / PROCESSES, rel=0.05)
