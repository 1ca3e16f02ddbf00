"""The checks of several processes pass on a CPU, and find a group without gloo, wrong sums and lost processes."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from models.device.device import Device
from models.device.xla.device import XlaDevice
from models.parallel import processes
from tests.support.models.tiny import CPU
from train.device.checks import CheckContext, Outcome, run_check
from train.device.process_group import Report
from train.device.processes import FUNCTIONS, HOST_REMEDY, WRONG_SUMS, list_checks, run_functions
from train.distributed.parallel import Parallel

HANG_S = 20.0  # without a result, on a busy machine too


def run_two(folder: Path, work: Callable[..., None] = run_functions, device: Device = CPU) -> dict[str, Outcome]:
    """Run the checks of two processes, and return the outcomes by the names of the functions."""
    context = CheckContext(device=device, folder=folder)
    with closing(list_checks(context, work=work, timeout_s=HANG_S)) as checks:
        outcomes = [run_check("processes", check) for check in islice(checks, len(FUNCTIONS))]
    return dict(zip(FUNCTIONS, outcomes, strict=True))


def run_without_gloo(report: Report, device: Device, folder: Path) -> None:
    processes.choose_backend = lambda _: "cuda:gloo"  # none for the host, which is also the device here
    run_functions(report, device, folder)


def run_without_sums(report: Report, device: Device, folder: Path) -> None:
    Parallel.all_reduce_sum = lambda self, values: values
    Parallel.prepare = lambda self, module: module
    Parallel.barrier = lambda self: None
    run_functions(report, device, folder)


def exit_at_barrier(report: Report, device: Device, folder: Path) -> None:
    _plant(Parallel.gather, lambda: os._exit(7))
    run_functions(report, device, folder)


def hang_at_barrier(report: Report, device: Device, folder: Path) -> None:
    _plant(Parallel.gather, lambda: time.sleep(300))
    run_functions(report, device, folder)


def _plant(gather: Callable[..., list[float]], fault: Callable[[], None]) -> None:
    """Let the second process end in the fault where it should gather."""

    def faulty(self: Parallel, number: float) -> list[float]:
        if self.data_rank == 1:
            os.write(1, b"the last words\n")
            fault()
        return gather(self, number)

    Parallel.gather = faulty


@pytest.mark.system
def test_two_processes_of_a_cpu_pass(tmp_path):
    outcomes = run_two(tmp_path)
    assert {name: outcome.detail for name, outcome in outcomes.items() if outcome.result != "PASS"} == {}
    assert [outcome.name for outcome in outcomes.values()] == [f"2 processes: {name}" for name in FUNCTIONS]


@pytest.mark.system
def test_a_group_without_gloo_fails_with_a_remedy(tmp_path):
    outcomes = run_two(tmp_path, run_without_gloo)
    host = outcomes["all-reduce of the host"]
    assert (host.result, host.remedy) == ("FAIL", HOST_REMEDY)
    assert "the process group has no gloo for the host, but cuda:gloo" in host.detail
    assert {outcomes[name].result for name in ("barrier", "gather", "distributed checkpoint")} == {"FAIL"}


@pytest.mark.system
def test_wrong_sums_and_a_barrier_that_does_not_wait_fail(tmp_path):
    outcomes = run_two(tmp_path, run_without_sums)
    for kind in ("fp32", "bf16"):
        outcome = outcomes[f"all-reduce of {kind}"]
        assert (outcome.result, outcome.remedy) == ("FAIL", WRONG_SUMS)
        assert "of 65536 sums are wrong" in outcome.detail
    for name in ("step by DDP", "step by FSDP2", "two micro-batches by FSDP2 in bf16"):
        assert "weights differ from a single process's" in outcomes[name].detail
    assert "the barrier let a process pass" in outcomes["barrier"].detail


@pytest.mark.system
@pytest.mark.parametrize(
    ("work", "how"),
    [
        (exit_at_barrier, "process 1 ended with exit code 7"),
        (hang_at_barrier, f"process 0, 1 gave no result in {HANG_S:g} s"),  # the first one waits for the second
    ],
)
def test_a_lost_process_fails_its_check_and_all_later_ones(tmp_path, work, how):
    outcomes = run_two(tmp_path, work)
    names = list(FUNCTIONS)
    lost = names.index("barrier")
    assert {outcomes[name].result for name in names[:lost]} == {"PASS"}
    assert outcomes["barrier"].detail.startswith(f"{how} at 'barrier'; its output ends in: the last words")
    assert all(outcomes[name].detail.startswith(f"not run: {how}") for name in names[lost + 1 :])


def test_processes_are_not_started_where_they_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    xla = XlaDevice(name="xla", torch_device=CPU.torch_device, dtype=CPU.dtype, compiles=True)
    for device, reason in (
        (xla, "PyTorch/XLA runs one process"),
        (replace(CPU, name="cuda"), "2 processes need as many devices, got 1"),
    ):
        outcomes = run_two(tmp_path, device=device)
        assert {outcome.result for outcome in outcomes.values()} == {"SKIP"}
        assert all(outcome.detail.startswith(reason) for outcome in outcomes.values())
