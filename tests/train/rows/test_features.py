"""Training from a feature store is training from the live target, read instead of computed."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.config import DataConf, DataSource, Dtype, OnPolicyConf, TeacherKind
from data.features.manifest import read_manifest
from data.packing.pack import pack_documents
from data.sources.training_rows import check_data_exists
from models.device.config import MachineConf
from models.drafts.base import Needs
from models.drafts.options import HydraConf, Medusa2Conf
from models.io.errors import UserError
from models.losses.config import LossConf, LossName
from tests.support.data import captured
from tests.support.models.tiny import LAYERS, VOCAB
from tests.support.runs.stored_run import BF16, EAGLE3, MEDUSA, METHODS, learned, losses, training
from tests.support.runs.toy_run import metrics, weights
from train.checks import check_inputs
from train.config.run import TrainPlanConf
from train.planning.choice import plan_run
from train.planning.trace import DRAFT_PASS, TARGET_PASS, fake_stored_output

# rounding changes the likeliest token of some positions, which a small vocabulary may lack
FULL = replace(EAGLE3, vocab_size=None)
MACHINE = MachineConf(
    name="sample", chips=1, cores=1, memory_gib=64.0, bandwidth_gb_s=100.0, tflops={"float32": 1.0, "bfloat16": 4.0}
)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_has_the_loss_that_it_has_live(folder, method):
    """The losses are bit-equal for a target in bf16 and its store in bf16, also without the target's layers."""
    draft = METHODS[method]
    store_path = captured.captured(
        captured.conf(folder, draft=draft, precision=BF16, dtype=Dtype.bf16, run_name=method)
    )
    learned(training(folder, draft, name=f"{method} live"))
    from_store = training(folder, draft, name=f"{method} stored", store=store_path)
    learned(from_store)
    live, stored = losses(folder, f"{method} live"), losses(folder, f"{method} stored")
    assert len(set(live)) == len(live) == 6
    assert stored == live
    if method != "draft model":  # which is cut from the target's layers
        learned(replace(from_store, run_name=f"{method} alone", measure=False))
        assert losses(folder, f"{method} alone") == live
    waits = [line["train/data_wait"] for line in metrics(folder / "train" / f"{method} stored")]
    assert all(0 <= wait < 1 for wait in waits)


def test_a_store_with_the_teacher_of_prompts_gives_the_losses_of_learning_prompts(folder):
    draft, loss = METHODS["eagle3"], LossConf(name=LossName.soft_ce, on_prompts=True)
    capture = captured.conf(folder, draft=draft, precision=BF16, dtype=Dtype.bf16, run_name="prompts", on_prompts=True)
    learned(training(folder, draft, name="prompts live", loss=loss))
    learned(training(folder, draft, name="prompts stored", loss=loss, store=captured.captured(capture)))
    assert losses(folder, "prompts stored") == losses(folder, "prompts live")


def test_a_store_with_the_teacher_of_prompts_serves_a_method_that_reads_every_final_state(folder):
    hydra = HydraConf(heads=3)  # its prefix layer attends
    options = {"precision": BF16, "dtype": Dtype.bf16, "on_prompts": True}
    store_path = captured.captured(captured.conf(folder, draft=EAGLE3, run_name="eagle3 for hydra", **options))
    learned(training(folder, hydra, name="hydra of eagle3, stored", store=store_path))
    learned(training(folder, hydra, name="hydra of eagle3, live"))
    assert losses(folder, "hydra of eagle3, stored") == losses(folder, "hydra of eagle3, live")


def test_prompts_are_not_learned_from_a_store_without_their_teacher(folder, store):
    line = get_refusal(folder, EAGLE3, store, "answers alone", loss=LossConf(on_prompts=True))
    assert line.startswith("loss.on_prompts: must be false with ")
    assert line.endswith("or capture with on_prompts=true under another run_name")


@pytest.mark.parametrize(("dtype", "close"), [(Dtype.int8, 0.01), (Dtype.fp8, 0.03)])
@pytest.mark.parametrize("draft", [FULL, MEDUSA], ids=lambda draft: draft.method)
def test_smaller_stores_are_close(folder, draft, dtype, close):
    name = f"{draft.method} {dtype.value}"
    store_path = captured.captured(captured.conf(folder, draft=draft, precision=BF16, dtype=dtype, run_name=name))
    learned(training(folder, draft, name=name, store=store_path))
    learned(training(folder, draft, name=f"{name} live"))
    stored, live = losses(folder, name), losses(folder, f"{name} live")
    assert stored != live
    assert stored == pytest.approx(live, rel=close)


@pytest.mark.parametrize("loss", [LossName.lk_hybrid, LossName.ce])
def test_the_likeliest_tokens_teach_as_the_head_does(folder, loss):
    """With all tokens the loss differs only by fp16 log-probabilities; with half of them it is close.

    Log-probabilities of -8 to -16 are 2^-7 apart in fp16. Rounding moves each by half of that, and
    a probability, like the sums over them, by a share of 2^-8.
    """
    conf = LossConf(name=loss)
    learned(training(folder, FULL, name=f"head {loss.value}", loss=conf))
    live = losses(folder, f"head {loss.value}")
    for top_k, close in ((VOCAB, 2**-8), (VOCAB // 2, 0.1)):
        name = f"{loss.value} of {top_k}"
        capture = captured.conf(
            folder, draft=FULL, precision=BF16, dtype=Dtype.bf16, run_name=name, teacher=TeacherKind.topk, top_k=top_k
        )
        learned(training(folder, FULL, name=name, store=captured.captured(capture), loss=conf))
        assert losses(folder, name) == pytest.approx(live, rel=close)


def test_a_run_may_read_the_first_documents_alone(folder, store):
    """`data.limit` counts documents of a store as it counts rows of a file."""
    few = {}
    for name, store_path in (("few live", None), ("few stored", store)):
        conf = training(folder, EAGLE3, name=name, store=store_path)
        learned(replace(conf, data=replace(conf.data, limit=8)))
        few[name] = losses(folder, name)
    assert few["few stored"] == few["few live"]
    learned(training(folder, EAGLE3, name="all of them", store=store))
    assert few["few stored"] != losses(folder, "all of them")


def interrupt_run(_):
    raise KeyboardInterrupt


def test_a_continued_run_ends_in_the_same_weights(folder, store):
    learned(training(folder, EAGLE3, name="unbroken", store=store))
    with pytest.raises(KeyboardInterrupt):  # in the evaluation after step 3; the last saved state is of step 2
        learned(training(folder, EAGLE3, name="broken", store=store), evaluate=interrupt_run)
    learned(training(folder, EAGLE3, name="broken", store=store))
    unbroken, broken = (weights(folder / "train" / name) for name in ("unbroken", "broken"))
    assert unbroken.keys() == broken.keys()
    assert all(torch.equal(unbroken[key], broken[key]) for key in unbroken)


# --- plans of runs from a store ----------------------------------------------------------------------


@pytest.mark.parametrize("teacher", TeacherKind)
@pytest.mark.parametrize("method", ["eagle3", "draft model"])
def test_a_plan_reads_rows_of_the_shapes_that_a_store_gives(folder, target, method, teacher):
    capture = captured.conf(folder, draft=METHODS[method], teacher=teacher, top_k=4, run_name=f"{method} {teacher}")
    path = captured.captured(capture)
    needs = Needs(layers=LAYERS if method == "eagle3" else [], hidden=False, context=False)
    store = captured.opened(path, target, needs)
    rows, _ = pack_documents(store.documents, captured.LENGTH)
    real = store.read_target_output(rows.pieces([0, 1]), rows.length)
    layout = read_manifest(path).spec.schema
    fake = fake_stored_output(layout, needs, torch.Size([2, rows.length]), torch.float32)
    assert describe_tensors(fake) == describe_tensors(real)


def describe_tensors(output):
    """Return shape and type of each tensor that the target's output has."""
    teacher = vars(output.topk) if output.topk else {}
    parts = {"captured": output.captured, "hidden": output.hidden} | teacher
    return {name: (part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}


@pytest.mark.no_shapes
def test_a_plan_of_a_stored_run_has_no_pass_of_the_target(folder, store):
    """The pass of the draft costs the same; the features are those on disk."""
    live, stored = (
        plan_run(TrainPlanConf(**vars(training(folder, EAGLE3, name="plan", store=store_path)), machine=MACHINE))
        for store_path in (None, store)
    )
    before, now = live.best.phases, stored.best.phases
    assert before.keys() - now.keys() == {TARGET_PASS}
    assert before[DRAFT_PASS].flops_by_dtype == now[DRAFT_PASS].flops_by_dtype
    assert before[DRAFT_PASS].peak_bytes.total() == now[DRAFT_PASS].peak_bytes.total()
    assert 0 < stored.best.step_time["arithmetic"] < live.best.step_time["arithmetic"]
    on_disk = sum(len(data) for data in captured.files(store).values())
    assert stored.conf.tokens is not None
    assert stored.feature_bytes == round(on_disk / stored.conf.tokens)


# --- refused before a weight of the target is read --------------------------------------------


def get_refusal(folder, draft, store, name, **changes):
    conf = training(folder, draft, name=name, store=store)
    data = replace(conf.data, **changes.pop("data", {}))
    target = replace(conf.target, path=str(save_nan_weights(folder)))
    conf = replace(conf, target=target, data=data, **changes)
    with pytest.raises(UserError) as error:
        check_inputs(conf)
    assert "\n" not in str(error.value)
    return str(error.value)


def save_nan_weights(folder):
    """Save a target that is refused when its weights are loaded."""
    copy = folder / "NaN weights"
    if not copy.exists():
        shutil.copytree(folder / "target", copy)
        weights = load_file(copy / "model.safetensors")
        nan = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
        save_file(nan, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("draft", "data", "line"),
    [
        (Medusa2Conf(heads=4), {}, "data.source: must be documents for draft medusa2, which changes its"),
        (
            METHODS["draft model"],
            {"on_policy": OnPolicyConf(share=0.5, interval=2)},
            "data.on_policy.share: must be 0.0 with data.source=captured, got 0.5",
        ),
        (EAGLE3, {"keep_features": True}, "data.keep_features: must be False with data.source=captured, got True"),
        (replace(EAGLE3, layers=[1, 2, 3]), {}, "data.path: must hold what the draft reads, captured layers [1, 2, 3]"),
    ],
    ids=["trained target", "rows of the draft", "features in memory", "other layers"],
)
def test_a_run_that_a_store_cannot_serve_is_refused(folder, store, draft, data, line):
    assert get_refusal(folder, draft, store, "refused", data=data).startswith(line)


def test_a_missing_shard_is_named_before_the_target_is_read(folder, store, tmp_path):
    spoilt = shutil.copytree(store, tmp_path / "spoilt")
    (spoilt / "shard-00001.safetensors").unlink()
    line = get_refusal(folder, EAGLE3, spoilt, "missing")
    assert line.startswith("data.path: every file must be as it was written, got ")
    assert "shard-00001.safetensors, which is missing; `python -m data.capture " in line


def test_a_store_of_likeliest_tokens_serves_temperature_1_alone(folder):
    capture = captured.conf(folder, draft=EAGLE3, run_name="topk", teacher=TeacherKind.topk, top_k=4)
    line = get_refusal(folder, EAGLE3, captured.captured(capture), "warm", loss=LossConf(temperature=0.7))
    assert line.startswith("loss.temperature: must be 1 with a store of teacher=topk, got 0.7")


def test_a_folder_that_is_no_store_is_refused(folder):
    line = get_refusal(folder, EAGLE3, folder, "none")
    assert line.startswith("data.path: must be a feature store, got ")


def test_a_store_must_be_named_by_its_path(folder):
    with pytest.raises(UserError, match=r"^data\.path: must be set for data\.source=captured"):
        check_data_exists(DataConf(source=DataSource.captured))
