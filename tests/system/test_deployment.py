"""Manifests follow the published schemas, scripts pass shellcheck, our commands in them compose."""

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
from train.config.run import TrainConf

SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MANIFESTS = sorted((ROOT / "scripts/eks").glob("*.yaml"))
KUBERNETES = ("1.34", "1.37")  # the first with resource claims (DRA), and the newest that is published
CUSTOM = {"TrainingRuntime", "TrainJob"}  # Kubeflow's: Kubernetes publishes no schema for them


def resources(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def everything(kind: str) -> dict[str, dict]:
    found = [r for path in MANIFESTS for r in resources(path) if r["kind"] == kind]
    return {r["metadata"]["name"]: r for r in found}


def node_job(runtime: dict) -> dict:
    """The job of one node that a training runtime describes."""
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": runtime["metadata"]} | {
        "spec": job["template"]["spec"]
    }


def pod_spec(resource: dict) -> dict:
    job = node_job(resource) if resource["kind"] == "TrainingRuntime" else resource
    return job["spec"]["template"]["spec"]


RUNTIMES, JOBS = everything("TrainingRuntime"), everything("TrainJob")
PODS = [*RUNTIMES.values(), *everything("Deployment").values()]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_published_schemas(path, version):
    for resource in resources(path):
        if resource["kind"] == "TrainingRuntime":
            resource = node_job(resource)
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_runs_on_a_runtime_that_ships(job):
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    assert set(job["spec"]["trainer"]) == {"numNodes", "numProcPerNode", "args"}
    reference = job["spec"]["runtimeRef"]
    assert reference["kind"] == "TrainingRuntime"
    assert RUNTIMES[reference["name"]]["metadata"]["namespace"] == job["metadata"]["namespace"]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_asks_for_what_its_nodes_have(job):
    pod = pod_spec(RUNTIMES[job["spec"]["runtimeRef"]["name"]])
    instance = pod["nodeSelector"]["node.kubernetes.io/instance-type"]
    machine = yaml.safe_load((ROOT / f"conf/machine/{instance}.yaml").read_text())
    assert job["spec"]["trainer"]["numProcPerNode"] == machine["chips"] * machine["cores"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    assert int(limits["cpu"]) < machine["vcpus"]
    assert int(limits["memory"].removesuffix("Gi")) < machine["host_memory_gib"]
    if "claims" in container["resources"]:
        (claim,) = pod["resourceClaims"]
        template = everything("ResourceClaimTemplate")[claim["resourceClaimTemplateName"]]
        assert f"instanceType == '{instance}'" in str(template)
    else:
        assert int(limits["aws.amazon.com/neuron"]) == machine["chips"]


@pytest.mark.parametrize("resource", PODS, ids=lambda r: r["metadata"]["name"])
def test_pods_refer_to_what_ships_beside_them(resource):
    pod = pod_spec(resource)
    assert pod["serviceAccountName"] in everything("ServiceAccount")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {
        v["persistentVolumeClaim"]["claimName"]
        for v in volumes.values()
        if len(v) == 2 and "persistentVolumeClaim" in v
    }
    assert claims <= everything("PersistentVolumeClaim").keys()
    templates = {c["resourceClaimTemplateName"] for c in pod.get("resourceClaims", [])}
    assert templates <= everything("ResourceClaimTemplate").keys()
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path):
    checked = shell("shellcheck", "-x", path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("resource", PODS, ids=lambda r: r["metadata"]["name"])
def test_shell_in_manifests_passes_shellcheck(resource):
    for container in pod_spec(resource)["containers"]:
        if container["command"] == ["bash", "-c"]:
            (text,) = container["args"]
            checked = shell("shellcheck", "-s", "bash", "-", input=text)
            assert checked.returncode == 0, checked.stdout


def shell(*words: str | Path, **options) -> subprocess.CompletedProcess:
    words = (shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"), *words[1:])
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, **options)


def written() -> dict[str, list[Command]]:
    """Commands by the file that they stand in."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SCRIPTS}
    texts |= {str(path.relative_to(ROOT)): code(path.read_text()) for path in PAGES}
    for name, job in JOBS.items():
        trainer = job["spec"]["trainer"]
        (node,) = pod_spec(RUNTIMES[job["spec"]["runtimeRef"]["name"]])["containers"]
        launcher, *rest = node["command"]
        layout = [f"--nnodes={trainer['numNodes']}", f"--nproc-per-node={trainer['numProcPerNode']}"]
        texts[f"TrainJob {name}"] = shlex.join([launcher, *layout, *rest, *trainer["args"]])
    return {name: list(commands(text)) for name, text in texts.items()}


WRITTEN = {name: found for name, found in written().items() if found}
FOR_SURE = ("README.md", "docs/trainium.md", "scripts/slurm_train.sh", *(f"TrainJob {name}" for name in JOBS))


def test_commands_are_found_where_they_are():
    assert set(FOR_SURE) <= WRITTEN.keys()
    assert len(WRITTEN["docs/trainium.md"]) > 15


@pytest.mark.parametrize("place", WRITTEN)
def test_every_command_of_ours_composes(place):
    for command in WRITTEN[place]:
        if any("..." in word or "$" in word for word in command.words):  # a pattern, a loop
            continue
        for conf in command.configs():
            if command.module == "train":
                assert_spreads(conf, command.processes)
                assert_suits_its_route(conf)


def assert_spreads(conf: TrainConf, processes: int) -> None:
    """The rules that a launched run checks first, without the target's number of heads."""
    assert processes % conf.parallel.tensor == 0
    assert conf.optim.rows_per_step % (processes // conf.parallel.tensor) == 0


def test_refusals_are_shown_as_they_are_printed():
    shown = [one for page in PAGES for one in refusals(page.read_text())]
    assert shown
    for command, line in shown:
        with pytest.raises(USER_ERRORS) as refused:
            command.configs()
        assert error_to_line(refused.value) == line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page):
    named = re.findall(r"`((?:tests|scripts|conf|docs)/[\w/.-]+\.\w+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
