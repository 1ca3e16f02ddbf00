"""A plan states the memory of a run, as PyTorch's allocator measures it in a real step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from conf.entry import compose
from models import unrolled_attention
from models.device.config import MachineConf
from models.device.device import Device
from models.device.memory_trace import TracedPhase, fake_model
from models.io.errors import UserError
from models.meta_model import MetaTarget, build_meta_draft, build_meta_target, shard_target
from models.parallel import tensor_parallel
from models.targets.attention import without_kernel
from models.targets.config import TargetConf
from tests.support.models.family_models import SHAPE
from tests.support.models.parallel_layers import shard_state_dict
from tests.support.models.sharded import CUT, HEADED, build_model
from tests.support.models.tiny import CPU
from tests.support.reports.memory_run import KINDS, LENGTH, PROMPT, build_conf, build_trainer, measure_peak_bytes
from tests.support.reports.planned import ALONE, GENEROUS, HALF, VOCAB, config, model_outline, trace_alone
from train.config.run import TrainPlanConf
from train.optim import trained_parameters
from train.plan import main
from train.planning.choice import plan_run
from train.planning.fake_process import FROZEN, OPTIMIZER, PERSISTENT_PARTS, TARGET, TRAINED, persistent_memory
from train.planning.layout import build_layout, list_layouts
from train.planning.remedies import suggest_overrides
from train.planning.run_plan import count_graphs
from train.planning.tables import describe_launch, planned_steps, time_table
from train.planning.trace import DRAFT_PASS, EVALUATION
from train.quick_eval import build_quick_eval
from train.run.folder import disk_bytes_needed


@pytest.mark.parametrize(
    ("kind", "device", "micro_batches"),
    [(kind, CPU, 1) for kind in KINDS] + [("eagle3", HALF, 2)],
    ids=lambda value: value.dtype if isinstance(value, Device) else value,
)
def test_a_step_takes_the_planned_memory(kind, device, micro_batches, tmp_path):
    compare_step_with_plan(kind, device, micro_batches, tmp_path)


def test_a_step_with_attention_in_chunks_takes_the_planned_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(unrolled_attention, "CHUNK", LENGTH // 4)
    with without_kernel():
        compare_step_with_plan("eagle3", CPU, 1, tmp_path)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "draft model"])
def test_a_step_whose_layers_run_again_takes_the_planned_memory(kind, tmp_path):
    compare_step_with_plan(kind, CPU, 1, tmp_path, "optim.recompute=true")


def compare_step_with_plan(kind: str, device: Device, micro_batches: int, tmp_path: Path, *overrides: str) -> None:
    rows = [f"optim.rows_per_step={2 * micro_batches}", "optim.micro_batch_size=2"]
    run = build_conf(*KINDS[kind], *rows, *overrides)
    loop = build_trainer(run, device, tmp_path)
    loop._take_step()  # creates the moments
    taken = measure_peak_bytes(loop._take_step)

    target = model_outline(device)
    phases = trace_alone(run, target, build_meta_draft(run.draft, target, loss=run.loss, seed=0), prompt_tokens=PROMPT)
    held = phases.pop(EVALUATION).peak_bytes
    moments = [m for o in loop.training_state.optimizers for s in o.state.values() for m in s.values()]
    assert held[TARGET] == sum(t.nbytes for t in loop.target.model.state_dict().values()) + sum(
        b.nbytes for n, b in loop.target.model.named_buffers() if n not in loop.target.model.state_dict()
    )
    parameters = sum(p.nbytes for p in loop.draft.parameters())
    buffers = sum(b.nbytes for b in loop.draft.buffers())
    assert held[FROZEN] + held[TRAINED] == parameters + buffers
    assert held[OPTIMIZER] == sum(m.nbytes for m in moments)
    target = model_outline(device)
    draft = build_meta_draft(run.draft, target, loss=run.loss, seed=0)
    stays = persistent_memory(run, target, draft, build_layout(run, ALONE, 4, 1))
    assert {part: stays[part] for part in PERSISTENT_PARTS} == {part: held[part] for part in PERSISTENT_PARTS}
    planned = max(
        phase.peak_bytes.total() - sum(phase.peak_bytes[part] for part in PERSISTENT_PARTS) for phase in phases.values()
    )
    assert taken <= planned <= 1.03 * taken


def trace_rows(kind: str, rows: int, device: Device = CPU, overrides: Sequence[str] = ()) -> dict[str, TracedPhase]:
    run = build_conf(*KINDS[kind], f"optim.rows_per_step={rows}", "loss.logits_chunk=96", *overrides)
    target = model_outline(device)
    draft = build_meta_draft(run.draft, target, loss=run.loss, seed=0)
    return trace_alone(run, target, draft, prompt_tokens=PROMPT)


@pytest.mark.parametrize(
    ("kind", "switch", "bytes_per_position"),
    [
        ("eagle1", "draft.feature_noise", 4 * config().hidden_size),
        ("eagle1", "draft.dropout", 2 * config().hidden_size),
        ("hydra", "draft.dropout", config().hidden_size),
    ],
)
def test_random_numbers_of_a_batch_are_in_the_plan(kind, switch, bytes_per_position):
    without, with_numbers = (
        trace_rows(kind, 2, overrides=[f"{switch}={value}"])[DRAFT_PASS].peak_bytes.total() for value in (0.0, 0.2)
    )
    assert with_numbers - without >= 2 * LENGTH * bytes_per_position


def test_random_numbers_of_a_micro_batch_move_to_the_device_only_for_its_pass(tmp_path):
    run = build_conf(*KINDS["eagle1"], "optim.rows_per_step=4", "optim.micro_batch_size=2")
    micro_batches = next(build_trainer(run, CPU, tmp_path).step_inputs)
    moved = [micro_batch.to(torch.device("meta")) for micro_batch in micro_batches]
    assert len(moved) == 2
    assert {micro_batch.batch.input_ids.device.type for micro_batch in moved} == {"meta"}
    assert {micro_batch.extras["noise"].device.type for micro_batch in moved} == {"cpu"}


def test_an_evaluation_takes_the_planned_memory(tmp_path):
    run = build_conf(*KINDS["eagle3"])
    loop = build_trainer(run, CPU, tmp_path)
    prompts = torch.randint(1, VOCAB, (run.held_out.selection, PROMPT)).tolist()
    judge = build_quick_eval(loop.target, prompts, run.tree.build(), run.evaluation, batch=run.held_out.batch)
    taken = measure_peak_bytes(lambda: judge(loop.draft.eval()))
    target = model_outline(CPU)
    phases = trace_alone(run, target, build_meta_draft(run.draft, target, loss=run.loss, seed=0), prompt_tokens=PROMPT)
    phase = phases[EVALUATION]
    assert phase.peak_bytes.total() - sum(phase.peak_bytes[part] for part in PERSISTENT_PARTS) == pytest.approx(
        taken, rel=0.1
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
    ],
)
def test_shipped_shapes_have_the_published_number_of_parameters(name, parameters):
    assert build_meta_target(TargetConf(name=name), torch.bfloat16).num_parameters == parameters


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_core_holds_its_share_of_the_target(ranks):
    """With eight cores, two cores have the same key-value head."""
    target = model_outline(CPU)
    parts = tensor_parallel.plan_shards(target.model, ranks, replicated=["lm_head"])
    state = target.model.state_dict()
    cut = shard_state_dict(state, parts, ranks=ranks, rank=0)
    shard_target(target, ranks, replicated=["lm_head"])
    held = sum(p.nbytes for p in target.model.parameters())
    assert held == sum(tensor.nbytes for tensor in cut.values())


@pytest.mark.parametrize("name", ["single key-value head", "gemma3"])
def test_a_table_that_embeddings_and_head_share_is_cut_once(name):
    """Gemma's embeddings, which scale their rows, are cut by transformers as well."""
    with torch.device("meta"):
        config = CUT[name]()
        config.tie_word_embeddings = True
        target = MetaTarget(build_model(config), name="outline", device=CPU)
    rows = target.vocab_size
    shard_target(target, 2, is_native=True)
    table = target.model.get_input_embeddings().weight
    assert table is target.model.get_output_embeddings().weight
    assert len(table) == rows // 2
    with fake_model([target.model], vocab=[]):
        logits = target.model(torch.ones(2, 5, dtype=torch.long)).logits
    assert logits.shape == (2, 5, rows)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["qwen2", "phi", "llama", "gemma3"])
def test_a_target_with_biases_is_cut_and_still_computes(name, ranks):
    """Biases of cut features are cut too; the bias of gathered features, as of Phi's head, is not."""
    biased = {"qwen2": transformers.Qwen2Config(**SHAPE | HEADED), "phi": transformers.PhiConfig(**SHAPE | HEADED)}
    with torch.device("meta"):
        model = build_model(biased[name] if name in biased else CUT[name]())
        target = MetaTarget(model, name="outline", device=CPU)
    parts = tensor_parallel.plan_shards(model, ranks)
    cut = shard_state_dict(model.state_dict(), parts, ranks=ranks, rank=0)
    shard_target(target, ranks)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: cut[name].shape for name, _ in model.named_parameters()
    }
    with fake_model([model], vocab=[]):
        logits = model(torch.ones(2, 5, dtype=torch.long)).logits
    assert logits.shape == (2, 5, model.config.vocab_size)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Return a folder that has of a target only its config.json."""
    config().save_pretrained(tmp_path / "target")
    return tmp_path


def build_plan_conf(folder, *overrides: str, machine: MachineConf = GENEROUS) -> TrainPlanConf:
    base = [
        "draft=demo-medusa",
        f"target.path={folder / 'target'}",
        "optim.rows_per_step=4",
        f"data.row_length={LENGTH}",
        "tree=chain",
        "tree.depth=3",
        "device=cpu",
    ]
    planned = compose("train_plan", TrainPlanConf, [*base, *overrides])
    planned.machine = machine
    return planned


def test_a_plan_that_does_not_fit_names_overrides_that_fit(folder):
    small = MachineConf(**vars(GENEROUS) | {"chips": 1, "cores": 1, "memory_gib": 0.09})
    before = plan_run(build_plan_conf(folder, machine=small))
    assert not before.fits(before.best)
    overrides = suggest_overrides(before)
    assert overrides
    assert not [override for override in overrides if override.startswith("parallel")]  # there is a single core
    after = plan_run(build_plan_conf(folder, *overrides, machine=small))
    assert after.fits(after.best)


def suggest_for_memory(folder, *overrides: str, gib_per_core: float) -> list[str]:
    memory = {"memory_gib": GENEROUS.cores * gib_per_core}
    plan = plan_run(build_plan_conf(folder, *overrides, machine=MachineConf(**vars(GENEROUS) | memory)))
    assert not plan.fits(plan.best)
    return suggest_overrides(plan)


def test_layers_run_again_before_rows_are_cut(folder):
    machine = MachineConf(**vars(GENEROUS) | {"chips": 1, "cores": 1, "memory_gib": 0.04})
    words = (
        "draft=demo-lm draft.layers=[0,3] optim=adamw optim.rows_per_step=1 loss.logits_chunk=8 data.row_length=512 "
        "held_out.batch=1"
    ).split()
    plan = plan_run(build_plan_conf(folder, *words, machine=machine))
    assert not plan.fits(plan.best)
    assert suggest_overrides(plan) == ["optim.recompute=true"]


@pytest.mark.slow
def test_the_layout_with_the_longest_rows_is_suggested(folder):
    """A single core could train on rows of 128 tokens, two cores on rows of 256, and of 384 if they share the draft."""
    machine = MachineConf(**vars(GENEROUS) | {"chips": 1, "cores": 2, "memory_gib": 0.0361})
    tight = (
        "draft=demo draft.layers=[1,2,3] draft.ttt_steps=1 optim=adamw optim.rows_per_step=2 optim.micro_batch_size=1 "
        "optim.recompute=true held_out.selection=1 loss.logits_chunk=64"
    ).split()
    short = plan_run(build_plan_conf(folder, *tight, "data.row_length=128", machine=machine))
    assert short.fits(short.options[0])
    assert short.options[0].layout.tensor == 1
    plan = plan_run(build_plan_conf(folder, *tight, "data.row_length=512", machine=machine))
    assert suggest_overrides(plan) == ["parallel.tensor=2", "parallel.draft=sharded", "data.row_length=384"]


def test_nothing_makes_the_start_of_a_run_smaller(folder):
    """ZeRO-1 starts with full moments, whatever its steps take."""
    words = ("device=xla", "parallel.draft=sharded", "optim=adamw", "parallel.tensor=2", "data.row_length=2048")
    plan = plan_run(build_plan_conf(folder, *words))
    phases = plan.best.memory_by_phase
    start, peak = phases["start"].total(), plan.best.peak_bytes
    assert start < peak
    for limit, has_remedy in (((start + peak) / 2, True), (0.99 * start, False)):
        gib = limit / 2**30 / (1 - plan.conf.memory_margin)
        assert bool(suggest_for_memory(folder, *words, gib_per_core=gib)) is has_remedy


def test_no_override_is_named_that_training_refuses(folder):
    assert "parallel.draft=sharded" in suggest_for_memory(folder, "parallel=replicated", gib_per_core=0.05)
    with pytest.raises(UserError, match=r"^optim\.name: must be adamw with device=xla, whose graphs"):
        build_plan_conf(folder, "device=xla", "optim=muon").check_settings()
    with pytest.raises(UserError, match=r"^parallel\.target: must be replicated with device=xla"):
        plan_run(build_plan_conf(folder, "device=xla", "parallel=sharded"))


def test_every_layout_trains_on_all_rows_with_the_cores_of_the_machine(folder):
    run = build_plan_conf(folder, "optim.rows_per_step=6", "optim.micro_batch_size=3")
    layouts = list_layouts(run, GENEROUS, model_outline(CPU))
    assert [layout.tensor for layout in layouts] == [1, 2, 4, 8]
    for layout in layouts:
        assert layout.data * layout.deal.parts * layout.rows * layout.micros == 6
        assert layout.processes <= 8


def test_rows_that_cores_repeat_are_told(folder):
    words = ("parallel.tensor=2", "optim.micro_batch_size=1", "optim.compile_loss=true")
    repeated, own = (
        plan_run(build_plan_conf(folder, *words, f"optim.rows_per_step={rows}", machine=GENEROUS)) for rows in (4, 8)
    )
    advice = "8 processes, parallel.tensor=2; 2 cores learn the same rows: 8 rows per step would give each its own"
    assert describe_launch(repeated) == advice
    assert describe_launch(own) == "8 processes, parallel.tensor=2"
    assert count_graphs(own) == 3  # the draft's layers, a chunk of the loss and the target's pass


def test_graphs_are_those_of_the_planned_processes_and_their_route(folder, monkeypatch):
    """Not of those that a pod has set for another launch; PyTorch/XLA has a whole step in one graph."""
    monkeypatch.setenv("WORLD_SIZE", "64")
    words = ("optim.rows_per_step=8", "optim.compile_loss=true")
    for route, graphs in (
        (("parallel.target=sharded", "parallel.draft=sharded"), 0),
        (("parallel.tensor=1",), 3),
        (("device=xla", "optim=adamw", "parallel.tensor=1", "parallel.draft=sharded", "data.keep_features=false"), 2),
    ):
        assert count_graphs(plan_run(build_plan_conf(folder, *words, *route, machine=GENEROUS))) == graphs


def test_a_draft_that_no_store_serves_is_planned():
    assert plan_run(compose("train_plan", TrainPlanConf, ["draft=demo-medusa2"])).feature_bytes > 0


def test_the_command_prints_a_plan(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv",
        [
            "plan",
            "draft=demo-medusa",
            f"target.path={folder / 'target'}",
            "machine=trn2.3xlarge",
            "tokens=1e6",
            f"data.row_length={LENGTH}",
        ],
    )
    main()
    printed = capsys.readouterr().out
    assert "It fits" in printed
    assert "4 cores of 24.00 GiB" in printed
    assert "132 bytes per token" in printed  # the final hidden state in int8, with its scale


def test_a_plan_of_epochs_states_its_steps_where_the_tokens_are_known(folder):
    """The data are 40 full rows, and a step takes 4."""
    epochs = ["optim.steps=null", "optim.epochs=2"]
    known = plan_run(build_plan_conf(folder, *epochs, f"tokens={40 * LENGTH}"))
    assert planned_steps(known) == 20
    assert ["the run", "20 steps"] in [row[:2] for row in time_table(known).rows]
    unknown = replace(known, conf=replace(known.conf, tokens=None))
    assert ["the run", "2 epochs", "give the data's tokens=N"] in time_table(unknown).rows
    target, draft = known.models
    all_weights, trained = (sum(p.numel() for p in ps) for ps in (draft.parameters(), trained_parameters(draft)))
    assert disk_bytes_needed(draft, target) == 4 * (2 * all_weights + 2 * 3 * trained)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.row_length=100"], "data.row_length: must be a multiple of 32 on generous, got 100; take 128"),
        (["parallel.tensor=3"], "parallel.tensor: must divide the 8 cores of generous, got 3"),
        (["memory_margin=1.5"], "memory_margin: must be at least 0 and below 1"),
        (["target.path=null", "target.name=nobody/nothing"], "target.name: must be a reachable"),
    ],
)
def test_mistakes_are_refused_in_a_single_line(folder, overrides, line):
    with pytest.raises(UserError) as refused:
        plan_run(build_plan_conf(folder, *overrides))
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "override", "line"),
    [
        ({"chips": 4}, "parallel.tensor=16", r"parallel\.tensor: .* a divisor of its 8 attention"),
        ({"repeats_heads": False}, "parallel.tensor=8", r"divide the target's 4 key-value heads"),
        (
            {"tflops": {"bfloat16": 4.0}},
            "device.precision=float32",
            r"device\.precision: must be one of bfloat16 on generous",
        ),
    ],
    ids=["heads", "repeated heads", "precision"],
)
def test_a_run_that_the_machine_cannot_do_is_refused(folder, machine, override, line):
    with pytest.raises(UserError, match=line):
        plan_run(build_plan_conf(folder, override, machine=MachineConf(**vars(GENEROUS) | machine)))
