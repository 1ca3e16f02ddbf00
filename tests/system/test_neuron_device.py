"""A device named `neuron` over host memory is used by its name alone.

It fills the slot that the native packages fill (PyTorch's PrivateUse1), is found by their entry
points and has a compiler of their name; operators go through PyTorch's fallback to the CPU. It runs
in separate processes, as PyTorch has one such slot and no way to empty it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from conf.entry import compose
from models.device.opening import open_device
from models.io.errors import UserError
from tests.neuron_device import story
from tests.train.test_distillation import folder as small_run  # noqa: F401, a fixture
from train.config.run import TrainConf
from train.distributed.build import build_parallel
from train.run.folder import open_run

HERE = Path(__file__).parents[1]
COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
NATIVE = [int(part) for part in torch.__version__.split(".")[:2]] >= [2, 13]
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build the device with"),
    pytest.mark.skipif(not NATIVE, reason="native packages are for torch 2.13 and newer"),
]

SMALL = (
    "target.name=target draft.layers=[1,3,5] draft.ttt_steps=2 draft.vocab_size=null data=jsonl "
    "data.path=rows.jsonl data.row_length=64 evaluation.prompts=prompts.jsonl evaluation.max_new_tokens=2 "
    "evaluation.batch_sizes=[] tree=chain tree.depth=2 optim=adamw optim.steps=1 optim.rows_per_step=2 "
    "optim.compile_loss=false interval.save=1 interval.eval=9 device.compile=false device.threads=1 output_dir=out "
    "run_name=on_device"
).split()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of the installed device: its library, its package and the package's metadata."""
    folder = tmp_path_factory.mktemp("device")
    library, site = folder / "device.so", folder / "site"
    build_library(HERE / "neuron_device/device.cpp", library)
    site.mkdir()
    (folder / "neuronx-cc").touch(mode=0o755)
    (site / "torch_neuronx").symlink_to(HERE / "neuron_device/torch_neuronx")
    torch_version = ".".join(torch.__version__.split(".")[:2])
    for name, version in (("torch-neuronx", f"{torch_version}.3.0"), ("neuronx-cc", "2.28.0")):
        metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if name == "torch-neuronx":
            (metadata / "entry_points.txt").write_text(
                "[torch.backends]\ntorch_neuronx = torch_neuronx:autoload\n"
                "[torch_dynamo_backends]\nneuron = torch_neuronx.compiler:neuron\n"
            )
    path = os.pathsep.join([str(site), str(HERE.parent)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON", "TORCH"))}
    return inherited | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "NEURON_OVER_HOST": str(library),
        "OMP_NUM_THREADS": "1",
    }


def build_library(source: Path, library: Path) -> None:
    roots = [f"-I{path}" for path in cpp_extension.include_paths()]
    torch_lib = Path(torch.__file__).parent / "lib"
    command = [
        COMPILER,
        *"-O0 -shared -fPIC -std=c++20".split(),
        *roots,
        str(source),
        "-o",
        str(library),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{torch_lib}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    compilation = subprocess.run(command, capture_output=True, text=True)
    assert compilation.returncode == 0, compilation.stderr[:3000]


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    process = subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def facts(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    run([str(HERE / "neuron_device/story.py"), str(folder)], environment, folder)
    return json.loads((folder / "facts.json").read_text())


def test_tensors_are_placed_and_cast_by_name(facts):
    placement = facts["placement"]
    assert placement["described"]["name"] == "neuron"
    assert placement["described"]["dtype"] == "bfloat16"
    assert placement["described"]["environment"] == {
        "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "14400",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    }
    assert placement["accelerate"] == [True, "neuron"]
    assert placement["weights"] == ["neuron", "torch.float32"]
    assert placement["autocast"] == ["torch.bfloat16", "torch.float32", "neuron"]
    assert placement["outside"] == "torch.float32"
    assert placement["moved"]


def test_its_random_state_is_seeded_and_restored_and_sampling_on_it_is_refused(facts):
    state = facts["random state"]
    assert state["seeded"]
    assert state["restored"]
    assert state["refused"] == "aten::uniform_: this device has no generator; draw on the host"


@pytest.mark.parametrize("name", story.DRAFTS)
def test_it_learns_and_decodes_by_trees_as_the_cpu_does(facts, tmp_path, name):
    learned, expected = facts[name], story.train_and_decode("cpu", name, tmp_path)
    assert (learned["on"], expected["on"]) == (["neuron"], ["cpu"])
    assert learned["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert learned["greedy"] == expected["greedy"]
    assert learned["sampled"] == expected["sampled"]


def test_its_compiler_is_found_by_name_and_compiles_once(facts):
    compiled = facts["compiled"]
    assert compiled["backend"] == "neuron"
    assert compiled["compiled"] == compiled["announced"]
    assert compiled["announced"] == {"prefill": 1, "begin:eagle3": 1, "fused:eagle3": 1}
    assert compiled["graphs"] == [3, 3]  # of decoding twice; of the target, a draft and a chunk of its loss
    greedy = [ids for ids, _ in facts["eagle3"]["greedy"]]
    assert compiled["ids"] == 2 * greedy  # the target's own text, whatever the draft
    assert compiled["losses"] == pytest.approx(facts["medusa"]["losses"], rel=1e-5)


def test_a_run_needs_only_the_devices_name_and_is_not_resumed_on_another_device(environment, small_run, monkeypatch):  # noqa: F811
    output = run(["-m", "train", "device=neuron", *SMALL], environment, small_run)
    assert any(line.startswith("device: neuron, as configured (torch 2.") for line in output.splitlines())
    report = json.loads((small_run / "out/on_device/report.json").read_text())
    device = report["setup"]["device"]
    assert (device["name"], device["dtype"]) == ("neuron", "bfloat16")

    monkeypatch.chdir(small_run)
    conf = compose("train", TrainConf, ["device=cpu", *SMALL])
    with pytest.raises(UserError) as refused:
        open_run(conf, build_parallel(conf.parallel, open_device(conf.device), trackers=[]))
    assert str(refused.value) == (
        "device.route: the run was started with neuron, got cpu; use another run_name or resume=false"
    )
