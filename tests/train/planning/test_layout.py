"""Several processes take the memory that a plan states, as PyTorch's allocator measures it."""

import json
from pathlib import Path

import pytest

from tests.support.runs import launch_script

pytestmark = pytest.mark.slow
FEW = ("eagle3,replicated,fp32,1", "eagle3,sharded,fp32,1", "medusa,sharded,bf16,1", "eagle3,split,bf16,2")
MORE = (
    "eagle3,replicated,bf16,2",
    "eagle3,sharded,bf16,2",
    "draft model,sharded,bf16,2",
    "eagle3,split,fp32,1",
    "medusa,split,fp32,1",
    "draft model,split,bf16,1",
)


def measure_cases(folder: Path, cases: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return the measured and the planned bytes of each case."""
    launch_script("../reports/memory_run.py", folder, *cases, processes=4)
    return json.loads((folder / "bytes.json").read_text())


@pytest.mark.parametrize("cases", [FEW, MORE], ids=["few", "more"])
def test_steps_of_four_processes_take_the_planned_memory(tmp_path, cases):
    """The profiler misses what gloo's threads free, of a shared draft or target: measured figures may be too high.

    A plan takes every token for one that counts. Here the last ones of a row do not: a CPU drops them, and fills up the
    last chunk of the loss by a copy of 1.4 %.
    """
    bytes_by_case = measure_cases(tmp_path, cases)
    for case, (measured, planned) in bytes_by_case.items():
        missed = 0.02 if "replicated" in case else 0.05
        assert (1 - missed) * measured <= planned <= 1.01 * measured, case
    if cases is FEW:
        replicated, sharded, *_ = (measured for measured, _ in bytes_by_case.values())
        assert sharded < replicated
