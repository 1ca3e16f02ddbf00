"""Several processes take the memory that a plan states, as PyTorch's allocator measures it."""

import json

import pytest

from tests.support.runs import launch_script

pytestmark = pytest.mark.slow
CASES = (
    "eagle3,replicated,fp32,1",
    "eagle3,replicated,bf16,2",
    "eagle3,sharded,fp32,1",
    "eagle3,sharded,bf16,2",
    "medusa,sharded,bf16,1",
    "draft model,sharded,bf16,2",
    "eagle3,split,fp32,1",
    "eagle3,split,bf16,2",
    "medusa,split,fp32,1",
    "draft model,split,bf16,1",
)


@pytest.fixture(scope="module")
def bytes_by_case(tmp_path_factory) -> dict[str, tuple[int, int]]:
    folder = tmp_path_factory.mktemp("memory")
    launch_script("../reports/memory_run.py", folder, *CASES, processes=4)
    return json.loads((folder / "bytes.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_four_processes_takes_the_planned_memory(bytes_by_case, case):
    """The profiler misses what gloo's threads free, of a shared draft or target: measured figures may be too high.

    The plan counts the last two tokens of a row of 128, 1.6 %. They have no weight, so that a CPU leaves them out.
    """
    measured, planned = bytes_by_case[case]
    missed = 0.01 if "replicated" in case else 0.05
    assert (1 - missed) * measured <= planned <= (1 + 2 / 128) * measured


def test_a_shared_draft_takes_less_than_one_that_every_process_holds(bytes_by_case):
    (replicated, _), (sharded, _) = (bytes_by_case[f"eagle3,{weights},fp32,1"] for weights in ("replicated", "sharded"))
    assert sharded < replicated
