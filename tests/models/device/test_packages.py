"""Packages and a machine that do not fit are refused by name before anything is loaded.

Packages are folders of metadata on Python's path, which is all that installed packages show.
"""

import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from models.device.config import DeviceConf, DeviceName
from models.device.host import Host
from models.device.opening import choose_route, open_device
from models.device.packages import limit_spinning
from models.io.errors import UserError

ROOT = Path(__file__).parents[3]
NATIVE = {"torch": "2.14.0+cpu", "torch-neuronx": "2.14.3.0", "neuronx-cc": "2.28.7631.0"}
XLA = {"torch": "2.9.0+cpu", "torch_xla": "2.9.0"}
ON_NEURON = {**XLA, "libneuronxla": "2.2.17544.0", "torch-neuronx": "2.9.0.2.15.32035"}
COMPILER = {"neuronx-cc": "2.26.6360.0"}


@pytest.mark.parametrize(
    ("set_before", "expected"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_idle_threads_give_way_soon_unless_the_environment_says_how_they_wait(monkeypatch, set_before, expected):
    monkeypatch.setattr(os, "environ", dict(set_before))
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs packages; PyTorch sees no accelerator and PJRT_DEVICE is not set."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler there

    def install(packages: dict[str, str]) -> None:
        if "neuronx-cc" in packages:
            (tmp_path / "neuronx-cc").touch(mode=0o755)
        for name, version in packages.items():
            folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def build_machine(root: Path, *, neuron: bool = False, instance: str = "") -> Host:
    (root / "dev").mkdir(parents=True)
    if neuron:
        (root / "dev/neuron5").touch()  # a container may have any of them
    product = root / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text(f"{instance}\n")
    return Host(root=root)


@pytest.mark.parametrize(
    ("name", "packages", "says"),
    [
        ("neuron", {}, "torch-neuronx, which is not installed, got neuron; pip install"),
        ("neuron", NATIVE | {"torch-neuronx": "1.0"}, "got PyPI's placeholder 1.0; pip uninstall"),
        ("auto", {"torch-neuronx": "1.0"}, "torch-neuronx must come from Neuron's own index"),
        ("auto", {"neuronx-distributed": "0.1"}, "neuronx-distributed must come from Neuron's own"),
        ("auto", {"vllm-neuron": "0.1.0"}, "vllm-neuron must come from Neuron's own index"),
        ("neuron", NATIVE | {"torch": "2.13.0"}, "2.14.3.0 needs torch 2.14, got torch 2.13.0; pip"),
        ("neuron", NATIVE | {"torch-neuronx": "2.15.1"}, "needs torch-neuronx 2.13 or 2.14, got"),
        ("neuron", {"torch-neuronx": "2.9.0.2.15.32035"}, "of the XLA generation: use device=xla"),
        ("neuron", {k: v for k, v in NATIVE.items() if k != "neuronx-cc"}, "compiler neuronx-cc"),
        ("neuron", NATIVE, "PyTorch sees cpu here, got neuron; there is no /dev/neuron*"),
        ("neuron", NATIVE | {"torch_xla": "2.9.0"}, "must stand alone, got torch_xla of the XLA"),
        ("auto", NATIVE | {"libneuronxla": "2.2"}, "must stand alone, got libneuronxla of the XLA"),
        ("xla", {}, "torch_xla is not installed, got xla; install the `xla` extra"),
        ("xla", XLA | {"torch": "2.13.0"}, "xla needs torch and torch_xla 2.9, got torch 2.13.0"),
        ("xla", XLA | {"torch_xla": "2.8.1"}, "got torch 2.9.0 and torch_xla 2.8.1; pip install"),
        ("xla", ON_NEURON, "libneuronxla needs a Neuron device, got none at /dev/neuron*"),
        ("auto", ON_NEURON, "libneuronxla needs a Neuron device, got none at /dev/neuron*"),
    ],
)
def test_a_package_that_cannot_run_is_named_with_the_remedy(install, tmp_path, name, packages, says):
    install(packages)
    with pytest.raises(UserError, match=r"^device\.name: ") as refused:
        choose_route(name, build_machine(tmp_path / "laptop"))
    assert says in str(refused.value)
    assert ";" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("packages", [{"torch-neuronx": "1.0"}, NATIVE | XLA, ON_NEURON])
def test_the_cpu_can_be_chosen_whatever_is_installed(install, tmp_path, packages):
    install(packages)
    assert choose_route("cpu", build_machine(tmp_path / "laptop")).name == "cpu"


def test_a_compiler_on_the_path_is_enough(install, tmp_path):
    install(ON_NEURON)
    trainium = build_machine(tmp_path / "trn1", neuron=True)
    with pytest.raises(UserError, match="compiler neuronx-cc must be on PATH, got none"):
        choose_route("xla", trainium)
    compiler = tmp_path / "neuronx-cc"
    compiler.touch(mode=0o755)
    assert choose_route("xla", trainium).name == "xla"


@pytest.mark.parametrize(("name", "packages"), [("neuron", NATIVE), ("xla", ON_NEURON | COMPILER)])
def test_an_installed_compiler_must_be_where_the_backend_looks(install, tmp_path, name, packages):
    install(packages)
    trainium = build_machine(tmp_path / "trn", neuron=True)
    (tmp_path / "neuronx-cc").unlink()  # as where the environment's folder is not on PATH
    with pytest.raises(UserError, match="compiler neuronx-cc must be on PATH") as refused:
        choose_route(name, trainium)
    remedy = f"it is installed: export PATH={sysconfig.get_path('scripts')}:$PATH"
    assert str(refused.value).endswith(remedy)


def test_the_native_route_is_refused_on_older_cores(install, tmp_path):
    install(NATIVE)
    with pytest.raises(UserError, match=r"needs Trainium 2 or 3, got neuron on trn1\.32xlarge"):
        choose_route("neuron", build_machine(tmp_path / "trn1", neuron=True, instance="trn1.32xlarge"))


def test_auto_takes_the_cores_of_the_older_route(install, tmp_path):
    install(ON_NEURON | COMPILER)
    choice = choose_route("auto", build_machine(tmp_path / "trn1", neuron=True, instance="trn1.2xlarge"))
    assert (choice.name, choice.reason) == ("xla", "libneuronxla is installed")


def test_auto_takes_the_device_that_the_environment_names(install, tmp_path, monkeypatch):
    install(XLA)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    choice = choose_route("auto", build_machine(tmp_path / "laptop"))
    assert (choice.name, choice.reason) == ("xla", "PJRT_DEVICE=CPU is set")


def test_idle_cores_are_reported(install, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        choice = choose_route("auto", build_machine(tmp_path / "trn2", neuron=True, instance="trn2.3xlarge"))
    assert (choice.name, choice.reason) == ("cpu", "PyTorch sees no accelerator")
    assert [r.getMessage() for r in caplog.records] == [
        "this machine has Neuron cores, but no package that drives them is installed: "
        "running on the CPU (see docs/trainium.md)"
    ]


def test_the_choice_and_its_reason_are_a_single_line(install, caplog):
    install({"torch": "2.13.0+cpu", "neuronx-cc": "2.28.7631.0"})
    with caplog.at_level(logging.INFO):
        open_device(DeviceConf(name=DeviceName.auto, compile=False))
    assert [r.getMessage() for r in caplog.records] == [
        "device: cpu, PyTorch sees no accelerator (torch 2.13.0, neuronx-cc 2.28.7631.0)"
    ]


@pytest.mark.system
def test_a_package_of_another_torch_is_named_and_not_loaded(tmp_path):
    """PyTorch itself would load the package and end in a traceback."""
    site = tmp_path / "site"
    metadata = site / "torch_neuronx-2.99.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: torch-neuronx\nVersion: 2.99.1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_neuronx = torch_neuronx:load\n")
    (site / "torch_neuronx.py").write_text("raise ImportError('undefined symbol')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    process = subprocess.run(
        [sys.executable, "-m", "train", "device=neuron"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert (
        process.stderr.strip()
        .splitlines()[-1]
        .startswith("error: device.name: neuron needs torch-neuronx 2.13 or 2.14, got 2.99.1.0; pip install")
    )
    assert "Traceback" not in process.stderr
