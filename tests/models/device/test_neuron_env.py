"""Settings of compiler and runtime are set and recorded, and refused where they contradict each other."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from models.device.config import DeviceConf, Precision
from models.device.host import Host
from models.device.machine_specs import read_host_bytes
from models.device.neuron_env import NeuronEnv
from models.io.errors import UserError

ROOT = Path(__file__).parents[3]
OWN = "/var/tmp/neuron-compile-cache"


@pytest.fixture(autouse=True)
def _restore_environment():
    """Restore the environment, which settings write to."""
    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("NEURON_", "TORCH")):
                del os.environ[name]
        yield


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text(
        "/dev/nvme0n1p1 / ext4 rw 0 0\n"
        "fs-0123.efs.us-east-1.amazonaws.com:/ /mnt/efs nfs4 rw 0 0\n"
        "10.0.0.1@tcp:/fsx /fsx lustre rw 0 0\n"
        "/dev/nvme1n1 /fsx/scratch xfs rw 0 0\n"
    )
    return Host(root=tmp_path)


def test_without_settings_no_variable_is_set(machine):
    before = dict(os.environ)
    for route in ("cpu", "cuda"):
        assert NeuronEnv().set_environment(route, on_neuron=False, host=machine) == {}
    assert os.environ == before


def test_every_setting_reaches_the_native_route_and_is_recorded(machine):
    settings = NeuronEnv(cache_dir="/mnt/efs/neff", stochastic_rounding=True, logical_cores=1, visible_cores="0-3")
    recorded = settings.set_environment("neuron", on_neuron=True, host=machine)
    assert recorded == {
        "TORCH_NEURONX_NEFF_CACHE_DIR": "/mnt/efs/neff",  # hosts may share this cache
        "TORCH_NEURONX_HLO_CACHE_DIR": "/mnt/efs/neff/hlo",
        "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "14400",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "NEURON_RT_VISIBLE_CORES": "0-3",
        "NEURON_CC_FLAGS": "--logical-nc-config=1",
    }
    assert recorded.items() <= os.environ.items()
    assert settings.set_environment("neuron", on_neuron=True, host=machine) == recorded


@pytest.fixture
def native_package(tmp_path, monkeypatch):
    """Return a folder on the path with the metadata of the native package, which is all that is seen of it here."""
    folder = tmp_path / "site"
    metadata = folder / "torch_neuronx-2.14.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.14.0\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_without_the_native_package_no_cache_folder_is_exported(machine):
    NeuronEnv(cache_dir="/mnt/efs/neff").export_variables()
    assert not [name for name in os.environ if name.startswith("TORCH_NEURONX")]


def test_exported_cache_folders_are_those_of_the_route(machine, native_package):
    settings = NeuronEnv(cache_dir="/mnt/efs/neff")
    settings.export_variables()
    exported = dict(os.environ)
    assert exported["TORCH_NEURONX_HLO_CACHE_DIR"] == "/mnt/efs/neff/hlo"
    recorded = settings.set_environment("neuron", on_neuron=True, host=machine)
    assert {name: value for name, value in recorded.items() if name.startswith("TORCH")}.items() <= exported.items()


@pytest.mark.parametrize("instance", ["trn1.32xlarge", "inf2.xlarge"])
def test_cores_that_are_not_grouped_take_no_grouping(machine, instance):
    product = machine.root / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text(f"{instance}\n")
    with pytest.raises(UserError, match=rf"^device.logical_cores: must be null on {instance}, .* got 2; leave it out"):
        NeuronEnv(logical_cores=2).set_environment("xla", on_neuron=True, host=machine)


def test_settings_of_cores_are_exported_before_the_device_is_looked_for(machine, native_package):
    settings = NeuronEnv(logical_cores=1, num_cores=2)
    settings.export_variables()
    assert (os.environ["NEURON_LOGICAL_NC_CONFIG"], os.environ["NEURON_RT_NUM_CORES"]) == ("1", "2")
    assert settings.set_environment("neuron", on_neuron=True, host=machine)["NEURON_RT_NUM_CORES"] == "2"


@pytest.mark.system
def test_a_command_sets_its_cache_folders_before_it_imports_torch(tmp_path, native_package):
    program = """
import builtins, os, sys
from train import __main__ as command

imported, load = [], builtins.__import__
def record(name, *args, **kwargs):
    if name == "torch" and not imported:
        imported.append(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR"))
    return load(name, *args, **kwargs)
builtins.__import__ = record
sys.argv = ["train", "device=neuron", "device.cache_dir=/graphs"]
try:
    command.main()
except SystemExit:
    print(imported)
"""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(native_package)]), "PATH": os.environ["PATH"]}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1:] == ["['/graphs']"], result.stderr


@pytest.mark.parametrize("setting", [{"visible_cores": "0-3"}, {"num_cores": 4}])
def test_processes_of_the_native_route_take_their_cores_from_torchrun(machine, setting):
    os.environ["WORLD_SIZE"] = "4"
    NeuronEnv(**setting).set_environment("xla", on_neuron=True, host=machine)
    with pytest.raises(UserError) as refused:
        NeuronEnv(**setting).set_environment("neuron", on_neuron=True, host=machine)
    [(key, value)] = setting.items()
    assert str(refused.value) == (
        f"device.{key}: must be null in a run of several processes, whose backend takes a core for each, "
        f"got {value}; leave it out"
    )


def test_safe_defaults_of_the_older_route(machine):
    os.environ["NEURON_CC_FLAGS"] = "--model-type=transformer"
    assert NeuronEnv().set_environment("xla", on_neuron=True, host=machine) == {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none",
    }


def test_the_users_own_casts_stay(machine):
    os.environ["NEURON_CC_FLAGS"] = "--auto-cast matmult"
    recorded = NeuronEnv().set_environment("xla", on_neuron=True, host=machine)
    assert recorded["NEURON_CC_FLAGS"] == "--auto-cast matmult"


def test_pytorchs_own_compiler_takes_the_folder_too(machine):
    variables = NeuronEnv(cache_dir="/fsx/graphs").set_environment("cpu", on_neuron=False, host=machine)
    assert variables == {"TORCHINDUCTOR_CACHE_DIR": "/fsx/graphs"}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/fsx/graphs"


def test_a_setting_that_the_environment_contradicts_is_refused(machine):
    os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"
    with pytest.raises(UserError) as refused:
        NeuronEnv().set_environment("neuron", on_neuron=True, host=machine)
    assert str(refused.value) == (
        "device.stochastic_rounding: must agree with the environment, which has "
        "NEURON_RT_STOCHASTIC_ROUNDING_EN=1, got 0; unset NEURON_RT_STOCHASTIC_ROUNDING_EN or "
        "change device.stochastic_rounding"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"NEURON_LOGICAL_NC_CONFIG": "1"},
        {"NEURON_CC_FLAGS": "-O1 --logical-nc-config=1"},
        {"NEURON_CC_FLAGS": "--lnc 1"},
        {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_CC_FLAGS": "-lnc=1"},
    ],
)
def test_runtime_and_compiler_group_cores_alike(machine, environment):
    os.environ |= environment
    with pytest.raises(UserError, match=r"^device\.logical_cores: runtime and compiler must agree"):
        NeuronEnv().set_environment("neuron", on_neuron=True, host=machine)
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = "1"
    os.environ["NEURON_CC_FLAGS"] = "-lnc=1"
    NeuronEnv(logical_cores=1).set_environment("neuron", on_neuron=True, host=machine)
    assert os.environ["NEURON_CC_FLAGS"] == "-lnc=1"


@pytest.mark.parametrize(("folder", "kind"), [("/mnt/efs/cache", "nfs4"), ("/fsx/cache", "lustre")])
@pytest.mark.parametrize("set_by", ["config", "variable", "flag"])
def test_the_older_routes_cache_is_not_shared_between_hosts(machine, folder, kind, set_by):
    settings = NeuronEnv(cache_dir=folder if set_by == "config" else None)
    if set_by == "variable":
        os.environ["NEURON_COMPILE_CACHE_URL"] = folder
    if set_by == "flag":
        os.environ["NEURON_CC_FLAGS"] = f"--cache_dir={folder}"
    for drives_neuron in (True, False):
        with pytest.raises(UserError) as refused:
            settings.set_environment("xla", on_neuron=drives_neuron, host=machine)
        assert f"got {folder} on {kind}; use {OWN} or s3://" in str(refused.value)


@pytest.mark.parametrize("folder", [OWN, "/fsx/scratch/cache", "s3://bucket/cache", None])
def test_a_cache_of_this_host_alone_is_taken(machine, folder):
    variables = NeuronEnv(cache_dir=folder).set_environment("xla", on_neuron=True, host=machine)
    assert variables.get("NEURON_COMPILE_CACHE_URL") == folder


@pytest.mark.parametrize(
    ("setting", "value"),
    [("stochastic_rounding", True), ("logical_cores", 2), ("visible_cores", "0"), ("num_cores", 1)],
)
def test_settings_of_neuron_cores_need_neuron_cores(machine, setting, value):
    with pytest.raises(UserError, match=rf"^device\.{setting}: is a setting of Neuron cores, got"):
        NeuronEnv(**{setting: value}).set_environment("cpu", on_neuron=False, host=machine)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logical_cores": 4}, r"device\.logical_cores: must be 1 or 2, got 4; null leaves it"),
        ({"visible_cores": "all"}, r"device\.visible_cores: must be core numbers such as 0-3"),
        ({"num_cores": 0}, r"device\.num_cores: must be at least 1, got 0"),
        ({"visible_cores": "0-1", "num_cores": 2}, r"device\.num_cores: must be null beside"),
        (
            {"stochastic_rounding": True, "precision": Precision.float32},
            r"device\.stochastic_rounding: rounds to bfloat16, got device\.precision=float32",
        ),
    ],
)
def test_contradicting_settings_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        DeviceConf(**fields)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "2000"}, [2000]),  # a container
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "3000"}, [3000]),
        ("5:cpu:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "4000"}, [4000]),
        ("0::/", {"memory.max": "max"}, []),
        (None, {}, []),
    ],
)
def test_the_limits_of_a_container_are_read(tmp_path, groups, limits, expected):
    if groups is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert Host(root=tmp_path).list_memory_limits() == expected
    machine = psutil.virtual_memory().total
    assert read_host_bytes(Host(root=tmp_path)) == min([machine, *expected])
