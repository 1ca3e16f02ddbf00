"""Manifests follow the published schemas, scripts pass shellcheck, and our commands in both compose."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from conf.entry import USER_ERRORS, error_to_line
from tests.support.commands.pages import ROOT, Command, assert_suits_its_route, code, commands, refusals
from train.config.optim import AUTO
from train.config.run import TrainConf

SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MANIFESTS = sorted((ROOT / "scripts/eks").glob("*.yaml"))
KUBERNETES = ("1.34", "1.37")  # the first with resource claims (DRA), and the newest that is published
CUSTOM = {"TrainingRuntime", "TrainJob"}  # Kubeflow's: Kubernetes publishes no schema for them


def read_resources(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def list_by_kind(kind: str) -> dict[str, dict]:
    resources = [r for path in MANIFESTS for r in read_resources(path) if r["kind"] == kind]
    return {r["metadata"]["name"]: r for r in resources}


def build_node_job(runtime: dict) -> dict:
    """Return the job of one node that a training runtime describes."""
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": runtime["metadata"]} | {
        "spec": job["template"]["spec"]
    }


def get_pod_spec(resource: dict) -> dict:
    job = build_node_job(resource) if resource["kind"] == "TrainingRuntime" else resource
    return job["spec"]["template"]["spec"]


RUNTIMES, JOBS = list_by_kind("TrainingRuntime"), list_by_kind("TrainJob")
HOSTS = {"trn1.32xlarge": (128, 512), "trn2.48xlarge": (192, 2048)}  # CPUs and GiB, as EC2 lists them
PODS = [*RUNTIMES.values(), *list_by_kind("Deployment").values()]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_published_schemas(path, version):
    for resource in read_resources(path):
        if resource["kind"] == "TrainingRuntime":
            resource = build_node_job(resource)
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_refers_to_a_shipped_runtime(job):
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    assert set(job["spec"]["trainer"]) == {"numNodes", "numProcPerNode", "args"}
    reference = job["spec"]["runtimeRef"]
    assert reference["kind"] == "TrainingRuntime"
    assert RUNTIMES[reference["name"]]["metadata"]["namespace"] == job["metadata"]["namespace"]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_requests_the_resources_of_its_nodes(job):
    pod = get_pod_spec(RUNTIMES[job["spec"]["runtimeRef"]["name"]])
    instance = pod["nodeSelector"]["node.kubernetes.io/instance-type"]
    machine = yaml.safe_load((ROOT / f"conf/machine/{instance}.yaml").read_text())
    assert job["spec"]["trainer"]["numProcPerNode"] == machine["chips"] * machine["cores"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    cpus, memory_gib = HOSTS[instance]
    assert int(limits["cpu"]) < cpus
    assert int(limits["memory"].removesuffix("Gi")) < memory_gib
    if "claims" in container["resources"]:
        (claim,) = pod["resourceClaims"]
        template = list_by_kind("ResourceClaimTemplate")[claim["resourceClaimTemplateName"]]
        assert f"instanceType == '{instance}'" in str(template)
    else:
        assert int(limits["aws.amazon.com/neuron"]) == machine["chips"]


@pytest.mark.parametrize("resource", PODS, ids=lambda r: r["metadata"]["name"])
def test_pods_refer_to_shipped_resources(resource):
    pod = get_pod_spec(resource)
    assert pod["serviceAccountName"] in list_by_kind("ServiceAccount")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {
        v["persistentVolumeClaim"]["claimName"]
        for v in volumes.values()
        if len(v) == 2 and "persistentVolumeClaim" in v
    }
    assert claims <= list_by_kind("PersistentVolumeClaim").keys()
    templates = {c["resourceClaimTemplateName"] for c in pod.get("resourceClaims", [])}
    assert templates <= list_by_kind("ResourceClaimTemplate").keys()
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path):
    checked = run_tool("shellcheck", "-x", path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("resource", PODS, ids=lambda r: r["metadata"]["name"])
def test_shell_in_manifests_passes_shellcheck(resource):
    for container in get_pod_spec(resource)["containers"]:
        if container["command"] == ["bash", "-c"]:
            (text,) = container["args"]
            checked = run_tool("shellcheck", "-s", "bash", "-", input=text)
            assert checked.returncode == 0, checked.stdout


def run_tool(*words: str | Path, **options) -> subprocess.CompletedProcess:
    words = (shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"), *words[1:])
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, **options)


def list_commands() -> dict[str, list[Command]]:
    """Return the commands by the file that they stand in."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SCRIPTS}
    texts |= {str(path.relative_to(ROOT)): code(path.read_text()) for path in PAGES}
    for name, job in JOBS.items():
        trainer = job["spec"]["trainer"]
        (node,) = get_pod_spec(RUNTIMES[job["spec"]["runtimeRef"]["name"]])["containers"]
        launcher, *rest = node["command"]
        layout = [f"--nnodes={trainer['numNodes']}", f"--nproc-per-node={trainer['numProcPerNode']}"]
        texts[f"TrainJob {name}"] = shlex.join([launcher, *layout, *rest, *trainer["args"]])
    return {name: list(commands(text)) for name, text in texts.items()}


COMMANDS = {name: parsed for name, parsed in list_commands().items() if parsed}
EXPECTED_FILES = ("README.md", "docs/trainium.md", "scripts/slurm_train.sh", *(f"TrainJob {name}" for name in JOBS))


def test_commands_are_found_in_the_expected_files():
    assert set(EXPECTED_FILES) <= COMMANDS.keys()
    assert len(COMMANDS["docs/trainium.md"]) > 15


@pytest.mark.parametrize("file", COMMANDS)
def test_every_command_of_scripts_pages_and_manifests_composes(file):
    for command in COMMANDS[file]:
        if any("..." in word or "$" in word for word in command.words):  # a pattern, a loop
            continue
        for conf in command.configs():
            if command.module == "train":
                assert_spreads(conf, command.processes)
                assert_suits_its_route(conf)


def assert_spreads(conf: TrainConf, processes: int) -> None:
    """Check the rules that a launched run checks first, except those on the target's number of heads."""
    assert processes % conf.parallel.tensor_size == 0
    if conf.parallel.tensor != AUTO or not conf.device.is_native:
        assert conf.optim.rows_per_step % (processes // conf.parallel.tensor_size) == 0


def test_pages_show_refusals_as_the_command_prints_them():
    shown = [refusal for page in PAGES for refusal in refusals(page.read_text())]
    assert shown
    for command, line in shown:
        with pytest.raises(USER_ERRORS) as refused:
            command.configs()
        assert error_to_line(refused.value) == line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page):
    named = re.findall(r"`((?:tests|scripts|conf|docs)/[\w/.-]+\.\w+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
