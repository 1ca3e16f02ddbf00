"""The peak of a process's memory is its own."""

import subprocess
import sys

import pytest
import torch

from models.device import memory_watch

PRINT_PEAK = "from models.device.memory_watch import read_host_peak; print(read_host_peak())"


def test_a_system_that_tells_no_peak_of_a_process_tells_the_inherited_one(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t1024 kB\n")
    monkeypatch.setattr(memory_watch, "STATUS", tmp_path / "status")
    assert memory_watch.read_host_peak() > 2**20


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no peak but the inherited one")
def test_a_command_that_a_large_process_starts_has_a_peak_of_its_own():
    ballast = torch.ones(2**28)
    peak = subprocess.run([sys.executable, "-c", PRINT_PEAK], capture_output=True, check=True).stdout
    assert int(peak) < ballast.nbytes
