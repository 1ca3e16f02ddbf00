"""A run asks the plan before it loads weights: it is refused, or `auto` takes the rows that fit."""

import functools
import json
import re
import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers
import yaml

from conf.entry import compose
from models.device.config import DeviceConf, MachineConf
from models.device.memory_trace import ACTIVATIONS
from models.drafts.options import Eagle3Conf
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.precision import resolve_machine
from tests.support.models.tiny import CPU, sampled_texts
from tests.support.runs.parallel_run import save_target
from tests.support.runs.toy_run import toy_conf
from train.__main__ import main
from train.config.run import ParallelConf, TrainConf
from train.distributed.build import build_parallel
from train.distributed.parallel import Parallel
from train.planning.device_fit import describe_machine, fit_run, plan_as_it_is, read_saved_settings
from train.planning.fake_process import TRAINED
from train.planning.trace import OPTIMIZER_STEP
from train.run.state import STATE_VERSION

GIB = 2**30
ROWS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Save a target, and texts to learn from."""
    folder = tmp_path_factory.mktemp("fit")
    target.tokenizer.save_pretrained(folder / "target")
    target.model.save_pretrained(folder / "target")
    rows = [{"ids": ids, "answer": [t >= 4 for t in range(32)]} for ids in sampled_texts(target, count=24, length=32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def no_weights(monkeypatch):
    """Let every loading of a model fail until the patch is undone."""
    with monkeypatch.context() as patch:
        patch.delattr(transformers.AutoModelForCausalLM, "from_pretrained")
        yield patch


def build_one_process() -> Parallel:
    """Build the processes of a run that is alone, anew: another run in this process may have reset Accelerate."""
    return build_parallel(ParallelConf(), CPU, trackers=[])


def build_conf(folder, *overrides: str) -> TrainConf:
    return compose(
        "train",
        TrainConf,
        [
            f"target.path={folder / 'target'}",
            "data=jsonl",
            f"data.path={folder / 'rows.jsonl'}",
            *"data.row_length=64 draft.ttt_steps=2 draft.vocab_size=null optim=adamw optim.steps=4".split(),
            f"optim.rows_per_step={ROWS}",
            *(
                "device=cpu device.compile=false device.threads=1 interval.eval=2 held_out.selection=2 "
                "held_out.report=2 interval.save=2 evaluation.max_new_tokens=4 evaluation.batch_sizes=[] tree=chain "
                "tree.depth=2"
            ).split(),
            f"output_dir={folder / 'out'}",
            *overrides,
        ],
    )


@functools.cache
def compute_planned_gib(folder, rows: int) -> float:
    """Compute the memory that a run with `rows` rows a pass needs; a tenth of the memory stays free."""
    fitted = fit_run(build_conf(folder, f"optim.micro_batch_size={rows}"), build_one_process())
    return fitted.planned_bytes / GIB / 0.9


def test_a_run_that_cannot_fit_is_refused_before_weights_are_loaded_with_overrides_that_fit(folder, no_weights):
    between = (compute_planned_gib(folder, 1) + compute_planned_gib(folder, ROWS)) / 2
    memory = [f"device.memory_gib={between}", f"optim.micro_batch_size={ROWS}"]
    rule = (
        r"^device\.memory_gib: must hold the run, which needs [\d.]+ GiB per process by its plan, "
        r"got [\d.]+ usable of [\d.]+; with (.*) it fits$"
    )
    with pytest.raises(UserError) as refused:
        main.__wrapped__(build_conf(folder, *memory, "run_name=refused"))
    overrides = re.match(rule, str(refused.value))[1].split()
    assert not (folder / "out" / "refused").exists()
    no_weights.undo()
    main.__wrapped__(build_conf(folder, *memory, "run_name=fits", *overrides))
    assert (folder / "out" / "fits" / "report.json").exists()


def test_the_key_of_the_memory_is_named_only_if_it_is_set(folder, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    with pytest.raises(UserError, match=r"^device: must hold the run, which needs "):
        fit_run(build_conf(folder), build_one_process())
    with pytest.raises(UserError, match=r"^device\.memory_gib: must hold the run, which needs "):
        fit_run(build_conf(folder, "device.memory_gib=1e-6"), build_one_process())


def test_a_target_that_stays_quantized_is_not_judged_by_its_full_size(folder, tmp_path, caplog):
    shutil.copytree(folder / "target", tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitnet"}}))
    conf = build_conf(folder, f"target.path={tmp_path / 'target'}", "device.memory_gib=1e-6")
    with caplog.at_level("INFO"):
        assert fit_run(conf, build_one_process()).planned_bytes is None
    assert "memory: quantized weights take less than is planned for" in caplog.text


def test_a_plan_takes_the_configured_memory():
    machine = MachineConf(name="two", chips=2, cores=2, memory_gib=80.0, bandwidth_gb_s=1.0)
    planned, _ = resolve_machine(machine, DeviceConf(memory_gib=3.0), TargetConf())
    assert planned.core_bytes == 3 * GIB


def test_an_accelerator_updates_all_weights_at_once_which_takes_a_copy_of_them(folder):
    size = ["optim.micro_batch_size=1", "device.memory_gib=1"]
    gpu = replace(build_one_process(), device=replace(CPU, name="cuda", torch_device=torch.device("cuda")))
    plans = [
        plan_as_it_is(build_conf(folder, *size), describe_machine(parallel, GIB), parallel.device)
        for parallel in (build_one_process(), gpu)
    ]
    in_turn, at_once = (plan.best.phases[OPTIMIZER_STEP].peak_bytes for plan in plans)
    assert at_once[ACTIVATIONS] >= in_turn[TRAINED] > in_turn[ACTIVATIONS]


@pytest.mark.usefixtures("no_weights")
def test_a_run_that_no_override_fits_needs_a_larger_device(folder):
    with pytest.raises(UserError, match=r"needs more than [\d.]+ GiB .*; take a larger device$"):
        main.__wrapped__(build_conf(folder, "device.memory_gib=1e-6"))


@pytest.mark.system
def test_auto_takes_the_most_rows_that_fit_and_a_continued_run_takes_the_same(folder, capsys):
    auto = ["optim.micro_batch_size=auto", "run_name=auto"]
    between = (compute_planned_gib(folder, 2) + compute_planned_gib(folder, 3)) / 2
    main.__wrapped__(build_conf(folder, *auto, "optim.schedule=constant", f"device.memory_gib={between}"))
    printed = capsys.readouterr().out
    assert "optim.micro_batch_size: auto takes 2, the most rows of a pass that fit" in printed
    assert re.search(
        r"memory of a process in training: [\d.]+ GiB of tensors planned, [\d.]+ GiB more in the "
        r"whole process, compiler and mapped files included",
        printed,
    )
    file = folder / "out" / "auto" / "config.yaml"
    assert yaml.safe_load(file.read_text())["optim"]["micro_batch_size"] == 2

    larger = build_conf(folder, *auto, "optim.schedule=constant", "optim.steps=6")
    main.__wrapped__(larger)
    assert "auto takes" not in capsys.readouterr().out
    assert yaml.safe_load(file.read_text())["optim"]["micro_batch_size"] == 2


def write_state(run_folder, config):
    state = run_folder / "state" / "00000002"
    state.mkdir(parents=True)
    (state / "progress.json").write_text(json.dumps({"version": STATE_VERSION, "config": config}))


@dataclass
class Launched:
    """Two processes that are alike."""

    conf: ParallelConf
    is_single_process = False
    device = CPU
    accelerator = SimpleNamespace(num_processes=2)

    def gather(self, number):
        return [number] * 2

    def run_on_main(self, function):
        return function()


@pytest.mark.parametrize(("tensor", "kept"), [(2, True), (4, False)])
def test_a_run_continues_on_fewer_processes_than_shared_its_target(tmp_path, monkeypatch, tensor, kept):
    monkeypatch.setenv("WORLD_SIZE", "2")
    save_target(tmp_path / "target", num_attention_heads=8, num_key_value_heads=8)
    target, optim = TargetConf(path=str(tmp_path / "target")), {"rows_per_step": 24}
    conf = toy_conf(target=target, draft=Eagle3Conf(layers=[0, 1, 2], ttt_steps=2), optim=optim)
    chosen = {"parallel.tensor": tensor, "parallel.target": "replicated", "parallel.draft": "replicated"}
    write_state(tmp_path / conf.run_name, chosen)
    fitted = fit_run(replace(conf, output_dir=str(tmp_path)), Launched(conf.parallel))
    assert (fitted.conf.parallel.tensor == tensor) == kept


def test_a_state_of_another_version_chooses_nothing(tmp_path):
    write_state(tmp_path / "toy", {"parallel.tensor": 4})
    file = tmp_path / "toy/state/00000002/progress.json"
    file.write_text(file.read_text().replace(str(STATE_VERSION), "1"))
    assert read_saved_settings(replace(toy_conf(), output_dir=str(tmp_path))) == {}


@pytest.mark.parametrize(("saved", "fitting"), [(4, 1), (ROWS, 3)])
def test_a_run_continues_on_a_smaller_device_with_fewer_rows(folder, saved, fitting, caplog):
    caplog.set_level("INFO")
    write_state(folder / "out" / f"less{saved}", {"optim.micro_batch_size": saved})
    continued = [f"run_name=less{saved}", "optim.micro_batch_size=auto"]
    memory = f"device.memory_gib={(compute_planned_gib(folder, fitting) * 1.001)}"
    assert fit_run(build_conf(folder, *continued), build_one_process()).conf.optim.micro_batch_size == saved
    fitted = fit_run(build_conf(folder, *continued, memory), build_one_process())
    assert fitted.conf.optim.micro_batch_size == fitting
    assert f"auto takes {fitting}, the most rows of a pass that fit" in caplog.text


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_overrides_have_rows_that_divide_those_of_a_process(folder, share):
    """Then a pass has as many rows as the override says."""
    fewest, most = compute_planned_gib(folder, 1), compute_planned_gib(folder, ROWS)
    memory = f"device.memory_gib={fewest + share * (most - fewest)}"
    with pytest.raises(UserError) as refused:
        fit_run(build_conf(folder, memory, f"optim.micro_batch_size={ROWS}"), build_one_process())
    rows = int(re.search(r"optim\.micro_batch_size=(\d+)", str(refused.value))[1])
    assert ROWS % rows == 0
