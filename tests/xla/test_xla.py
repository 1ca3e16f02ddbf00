"""The XLA route, on XLA's CPU device, computes what the CPU computes, with the announced graphs.

Each method is trained and decoded with twice, on the CPU and on XLA, by processes of an environment
that holds torch_xla (scripts/setup.sh xla).
"""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.commands.ports import find_free_port

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = Path(os.environ.get("XLA", ROOT / ".venv-xla")).absolute() / "bin" / "python"
METHODS = ("eagle3", "medusa", "draft model")
# Accelerate takes XLA wherever it is installed, unless a variable forbids it.
CHOSEN = {"cpu": {"USE_TORCH_XLA": "0"}, "xla": {"PJRT_DEVICE": "CPU"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the results of each method, {"cpu": ..., "xla": ...}; two methods run at a time."""
    folder = tmp_path_factory.mktemp("xla")

    def run_both(method: str) -> dict[str, dict]:
        results = {}
        for device in ("cpu", "xla"):
            run_method(method, device, folder / method)
            results[device] = json.loads((folder / method / f"{device}.json").read_text())
            results[device]["gradient"] = torch.load(folder / method / f"{device}.pt")
        return results

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(METHODS, pool.map(run_both, METHODS), strict=True))


def run_method(method: str, device: str, folder: Path) -> None:
    run_program("xla_run.py", device, [method, device, str(folder)])


def run_program(name: str, device: str, arguments: list[str], variables: dict[str, str] | None = None) -> None:
    """Run a program of this folder with the packages of the XLA route, on the CPU or on XLA."""
    command = [str(PYTHON), str(HERE / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | CHOSEN[device] | (variables or {})
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]


@pytest.mark.parametrize("method", METHODS)
def test_the_first_gradient_is_that_of_the_cpu(runs, method):
    ours, theirs = runs[method]["xla"]["gradient"], runs[method]["cpu"]["gradient"]
    assert len(ours) == len(theirs)
    for our_gradient, their_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_losses_are_those_of_the_cpu(runs, method):
    ours, theirs = (runs[method][name]["train"]["losses"] for name in ("xla", "cpu"))
    assert len(ours) == len(theirs) == 200
    assert ours[-1] < ours[0] - 0.5
    assert ours[:50] == pytest.approx(theirs[:50], abs=1e-4)
    assert ours[-1] == pytest.approx(theirs[-1], abs=1e-2)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_decoding_with_a_checkpoint_is_that_of_the_cpu(runs, method, shape):
    """Text, rounds and the tokens that each round accepts are the same for twenty prompts."""
    ours, theirs = (runs[method][name]["decode"][shape] for name in ("xla", "cpu"))
    assert ours == theirs
    assert len(ours) == 20
    assert sum(sum(accepted) for _, accepted in ours) > 20  # otherwise it would say nothing about the draft


@pytest.mark.parametrize("method", METHODS)
def test_graphs_are_as_many_as_announced_and_none_is_added(runs, method):
    train, decode = (runs[method]["xla"][part] for part in ("train", "decode"))
    assert train["compiled"] == train["warm"] == train["announced"]
    assert decode["by_function"] == decode["announced"]
    assert decode["compiled"] == sum(decode["announced"].values())  # as torch_xla counts them
    assert decode["late"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_no_operation_falls_back_to_the_host(runs, method):
    assert not runs[method]["xla"]["fallbacks"]


def test_two_processes_save_a_state_together_over_the_host(tmp_path):
    """Their default group is PyTorch/XLA's, which neuronx-distributed asks for and which cannot gather objects."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        ranks = [address | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        list(pool.map(lambda rank: run_program("processes_run.py", "xla", [str(tmp_path)], rank), ranks))
    (state,) = (tmp_path / "state").iterdir()
    assert {path.name for path in state.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "progress.json"}


def test_zero_1_steps_masters_in_fp32_behind_weights_in_bf16():
    """Four steps, stopped after two, end in the weights of plain AdamW; its engine is PyTorch/XLA's own."""
    run_program("zero_run.py", "xla", [])


@pytest.mark.parametrize("machine", ["8xh100", "trn1.32xlarge"])
def test_weights_that_processes_share_are_planned_with_the_packages_of_the_route(machine):
    """The packages hold the oldest PyTorch that is supported, and replace the function that makes a process group."""
    route = (
        ["device=xla", "optim=adamw", "parallel.draft=sharded"] if machine.startswith("trn1") else ["parallel=sharded"]
    )
    words = ["-m", "train.plan", f"machine={machine}", *route, "optim.rows_per_step=64", "parallel.tensor=1"]
    planned = subprocess.run(
        [str(PYTHON), *words], cwd=ROOT, env=os.environ | CHOSEN["cpu"], capture_output=True, text=True
    )
    assert "It fits" in planned.stdout, planned.stderr[-4000:]
