"""A run takes the layout that its plan chooses, and keeps every key of it that is set."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from conf.entry import compose
from models.device.config import MachineConf
from models.io.errors import UserError
from tests.support.models.tiny import sampled_texts
from tests.support.reports.planned import GENEROUS, config
from tests.support.runs import run_python
from train.config.run import ParallelConf, TrainConf, TrainPlanConf, Weights
from train.planning.choice import plan_run
from train.planning.device_fit import keep_choices
from train.planning.remedies import suggest_overrides
from train.run.state import flatten_config

RUN = (
    "draft=demo-lm draft.layers=[0,3] optim=adamw optim.rows_per_step=8 optim.micro_batch_size=1 loss.logits_chunk=8 "
    "data.row_length=512 held_out.batch=1 device=cpu tree=chain tree.depth=3"
).split()


def test_a_continued_run_keeps_what_was_chosen_but_not_against_what_is_set():
    asked = compose("train", TrainConf, ["loss.logits_chunk=64"])
    saved = flatten_config(
        replace(
            asked,
            parallel=ParallelConf(tensor=2, target=Weights.replicated, draft=Weights.sharded),
            optim=replace(asked.optim, recompute=True, micro_batch_size=1),
            loss=replace(asked.loss, logits_chunk=128),
        )
    )
    kept = keep_choices(asked, saved, with_layout=True)
    assert kept.parallel == ParallelConf(tensor=2, target=Weights.replicated, draft=Weights.sharded)
    assert (kept.optim.recompute, kept.loss.logits_chunk) == (True, 64)
    pinned = replace(asked, parallel=ParallelConf(tensor=1))
    assert keep_choices(pinned, saved, with_layout=True).parallel.tensor == 1
    assert keep_choices(asked, saved, with_layout=False).parallel == ParallelConf()
    assert keep_choices(asked, {}, with_layout=True) == asked


def eight_cores(gib_per_core: float) -> MachineConf:
    return replace(GENEROUS, chips=1, cores=8, memory_gib=8 * gib_per_core)


@pytest.mark.parametrize(
    ("gib_per_core", "tensor", "draft", "recompute"),
    [
        (0.06, 1, Weights.replicated, False),
        (0.04, 1, Weights.sharded, False),
        (0.03, 2, Weights.sharded, False),
        (0.02, 2, Weights.sharded, True),
    ],
)
def test_the_layout_that_costs_least_is_taken(tmp_path, gib_per_core, tensor, draft, recompute):
    config().save_pretrained(tmp_path)
    conf = compose("train_plan", TrainPlanConf, [*RUN, f"target.path={tmp_path}"])
    machine = eight_cores(gib_per_core)
    plan = plan_run(replace(conf, machine=machine))
    assert plan.fits(plan.best)
    assert plan.conf.parallel == ParallelConf(tensor=tensor, target=Weights.replicated, draft=draft)
    assert plan.conf.optim == replace(conf.optim, recompute=recompute)
    assert replace(plan.conf, parallel=conf.parallel, optim=conf.optim) == replace(conf, machine=machine)


@pytest.mark.parametrize(
    ("words", "is_split"),
    [
        ("draft.separate_lm_heads=true", True),
        ("draft.separate_lm_heads=false", False),
        ("parallel.draft=sharded", True),
    ],
)
def test_heads_of_their_own_are_split_where_no_process_could_gather_them(tmp_path, words, is_split):
    config().save_pretrained(tmp_path)
    run = (
        "draft=demo-medusa draft.separate_lm_heads=true optim.rows_per_step=8 data.row_length=256 loss.logits_chunk=64"
    )
    rest = f"tree=chain tree.depth=3 held_out.batch=1 device=cpu target.path={tmp_path}"
    conf = compose("train_plan", TrainPlanConf, [*run.split(), *words.split(), *rest.split()])
    plan = plan_run(replace(conf, machine=eight_cores(0.021)))
    assert plan.fits(plan.best)
    assert plan.conf.parallel.split_heads is is_split


@pytest.mark.parametrize(
    ("gib_per_core", "words", "chosen"),
    [
        (0.06, "parallel.tensor=2", {"tensor": 2}),
        (0.06, "parallel.draft=sharded", {"draft": Weights.sharded}),
        (0.06, "parallel.target=sharded", {"target": Weights.sharded}),
        (0.04, "parallel.draft=replicated", {"tensor": 2}),
    ],
)
def test_what_is_set_by_hand_is_kept(tmp_path, gib_per_core, words, chosen):
    config().save_pretrained(tmp_path)
    conf = compose("train_plan", TrainPlanConf, [*RUN, f"target.path={tmp_path}", *words.split()])
    plan = plan_run(replace(conf, machine=eight_cores(gib_per_core)))
    assert plan.fits(plan.best)
    assert plan.conf.parallel == ParallelConf(**vars(ParallelConf().settle()) | chosen)


@pytest.mark.parametrize("gib_per_core", [0.02, 0.0175])
def test_no_layout_is_planned_that_a_run_of_its_route_refuses(tmp_path, gib_per_core):
    """Processes of the XLA route that share a target cannot cut a draft from it."""
    config().save_pretrained(tmp_path)
    words = ["device=xla", "draft.lora.rank=4", *(word for word in RUN if word != "device=cpu")]
    conf = compose("train_plan", TrainPlanConf, [*words, f"target.path={tmp_path}"])
    plan = plan_run(replace(conf, machine=eight_cores(gib_per_core)))
    assert plan.best.layout.tensor == 1
    shared = [word for word in suggest_overrides(plan) if word.startswith("parallel.tensor")]
    assert shared in ([], ["parallel.tensor=1"])


def test_smaller_chunks_come_last_and_never_against_what_is_set_by_hand(tmp_path):
    config().save_pretrained(tmp_path)
    words = "draft=demo-medusa optim.rows_per_step=4 data.row_length=256 tree=chain tree.depth=3 device=cpu".split()
    tight = replace(GENEROUS, memory_gib=GENEROUS.cores * 0.05)
    fits = {}
    for layout in ("auto", "replicated"):
        conf = compose("train_plan", TrainPlanConf, [*words, f"target.path={tmp_path}", f"parallel={layout}"])
        plan = plan_run(replace(conf, machine=tight))
        fits[layout] = plan.fits(plan.best)
        assert plan.conf.optim == conf.optim
        assert (plan.conf.loss.logits_chunk < conf.loss.logits_chunk) == fits[layout]
    assert fits == {"auto": True, "replicated": False}


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        ("draft=demo-medusa optim.rows_per_step=3", 16),
        ("draft=demo-medusa parallel.tensor=1 optim.rows_per_step=4", 8),
        ("draft=demo-medusa2 optim.rows_per_step=4", 8),
    ],
)
def test_rows_that_no_layout_deals_to_all_cores_leave_the_run_as_it_is(tmp_path, words, cores):
    config().save_pretrained(tmp_path)
    rows = "data.row_length=256 tree=chain tree.depth=3 device=cpu".split()
    conf = compose("train_plan", TrainPlanConf, [*words.split(), *rows, f"target.path={tmp_path}"])
    plan = plan_run(replace(conf, machine=replace(GENEROUS, chips=1, cores=cores, memory_gib=0.05 * cores)))
    assert not plan.fits(plan.best)
    assert plan.conf.parallel == conf.parallel


def test_a_run_that_no_layout_fits_is_planned_as_if_none_was_chosen(tmp_path):
    config().save_pretrained(tmp_path)
    conf = compose("train_plan", TrainPlanConf, [*RUN, f"target.path={tmp_path}"])
    machine = MachineConf(**vars(GENEROUS) | {"chips": 1, "cores": 2, "memory_gib": 0.02})
    plan = plan_run(replace(conf, machine=machine))
    assert not plan.fits(plan.best)
    assert plan.conf.parallel == ParallelConf()


@pytest.mark.parametrize("tensor", [0, "all"])
def test_a_number_of_processes_is_positive_or_auto(tensor):
    with pytest.raises(UserError, match=rf"^parallel\.tensor: must be at least 1, or auto, got {tensor}; "):
        ParallelConf(tensor=tensor)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_train_in_the_layout_that_the_plan_names(target, tmp_path, processes):
    target.tokenizer.save_pretrained(tmp_path / "target")
    target.model.save_pretrained(tmp_path / "target")
    rows = [{"ids": ids, "answer": [t >= 4 for t in range(32)]} for ids in sampled_texts(target, count=24, length=32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"data=jsonl data.path=rows.jsonl data.row_length=64 target.path={tmp_path}/target draft.ttt_steps=2 "
        f"draft.vocab_size=null optim=adamw optim.steps=2 optim.rows_per_step={processes} optim.micro_batch_size=1 "
        "device=cpu device.compile=false held_out.selection=2 held_out.report=2 evaluation.max_new_tokens=4 "
        "evaluation.batch_sizes=[] tree=chain tree.depth=2 device.precision=float32"
    ).split()
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", "train")

    def train(memory_gib: float, *own: str) -> dict[str, Any]:
        chosen = (f"device.memory_gib={memory_gib}", "resume=false", "run_name=auto", *own)
        printed = run_python(*launcher, *words, *chosen, folder=tmp_path, OMP_NUM_THREADS="1")
        (layout,) = (line for line in printed.splitlines() if line.startswith("parallel: "))
        layouts.append(layout.removeprefix(f"parallel: {processes} processes train by "))
        return yaml.safe_load((tmp_path / "outputs/train/auto/config.yaml").read_text())

    def plan_gib(*layout: str) -> float:
        conf = compose("train_plan", TrainPlanConf, [*words, *layout])
        machine = replace(GENEROUS, chips=1, cores=processes, memory_gib=processes)
        return plan_run(replace(conf, machine=machine)).best.peak_bytes / (1 - conf.memory_margin) / 2**30

    layouts: list[str] = []
    replicated = {"tensor": 1, "target": "replicated", "draft": "replicated", "split_heads": False}
    sharing = ("parallel.tensor=1", "parallel.target=replicated", "parallel.draft=sharded")
    between = (plan_gib("parallel=replicated") + plan_gib(*sharing)) / 2
    assert train(1.0)["parallel"] == replicated
    conf = train(between)
    assert conf["parallel"] == replicated | {"draft": "sharded"}
    assert conf["optim"]["micro_batch_size"] == 1
    assert train(1.0, "parallel.draft=sharded")["parallel"] == conf["parallel"]
    # What is set by hand is kept, and not named as chosen.
    assert layouts == ["parallel.tensor=1", "parallel.tensor=1 parallel.draft=sharded", "parallel.tensor=1"]
