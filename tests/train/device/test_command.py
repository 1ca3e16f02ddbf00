"""The command writes its page and the same in JSON."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system  # each stage is a process


def test_the_command_checks_a_cpu_and_writes_both_files(tmp_path):
    options = ["device=cpu", "device.compile=false", "stages=[place,product,operators]", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "train.device", *options]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.md", "cpu.json"}
    outcomes = json.loads((tmp_path / "cpu.json").read_text())
    assert list(dict.fromkeys(outcome["stage"] for outcome in outcomes)) == ["place", "product", "operators"]
    results = {outcome["name"]: outcome["result"] for outcome in outcomes if outcome["stage"] != "place"}
    assert {name for name, result in results.items() if result != "PASS"} == {"again in another process"}
    page = (tmp_path / "cpu.md").read_text()
    assert all(f"| {outcome['name']} | {outcome['result']} |" in page for outcome in outcomes)
    last = ended.stdout.splitlines()[-1]
    assert last.endswith(f": {tmp_path / 'cpu.md'}")
    assert f"{sum(outcome['result'] == 'PASS' for outcome in outcomes)} PASS" in last
