"""Graphs are announced before a run and counted while it runs.

A further graph is an error where compiling takes long; elsewhere it is counted and warned of once.
"""

import logging
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from data.config import DataConf, OnPolicyConf
from infer.config import EvaluationConf
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from infer.measure.eval_modes import DraftUnderTest, TunedDecoding
from infer.measure.evaluate import compile_eval_graphs, evaluate_drafts
from infer.verify.config import Verification
from models.device.graph_budget import Graph, GraphLedger, UnannouncedGraphError, graph_key_of
from models.device.xla.device import XlaDevice
from models.drafts.medusa import MedusaDraft
from models.drafts.ngram import NgramDraft
from models.drafts.options import Medusa2Conf
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU, chain, mixed, new_draft, tiny_target
from tests.support.runs import launch_script, run_module
from tests.support.runs.graphs_run import LENGTH, LENGTHS, TREE, draw_texts, run_loop, run_loop_in, write_prompt_file
from tests.support.runs.parallel_run import save_target
from tests.support.runs.toy_run import metrics, toy_conf
from train.distributed.build import build_parallel
from train.graph_warmup import compile_training_graphs, warm_up_run
from train.planning import graph_plan

ROOT = Path(__file__).parents[2]
NUMBERS = {"factor": 3.0}
# The line of a compiled graph: its number, its time and its purpose in words.
PROGRESS = re.compile(
    r"graph \d+ of \d+: [\d.]+ s(, about [\d:]+ left)?: [a-zA-Z' ]+( \([a-z0-9_]+\))?"
    r"(, \d+ x \d+ tokens)?"
)


def triple(ids):
    return ids * NUMBERS["factor"]


def build_counting_device(backend: str = ""):
    """Build a device whose backend compiles nothing, or that only counts shapes."""
    return replace(CPU, compiles=bool(backend), counts_shapes=True, backend=backend, ledger=GraphLedger())


@pytest.mark.parametrize("backend", ["", "eager"])
def test_an_unannounced_shape_is_refused_before_it_is_compiled(backend):
    device, five = build_counting_device(backend), torch.zeros(5)

    def raise_ids(ids, layers):
        return ids.add_(len(layers))

    ours = device.compile(raise_ids, kind="demo")
    with device.ledger.expect_graphs([Graph("raise_ids:demo")], strict=True) as run:
        ours(torch.ones(4), [1, 3])
        ours(torch.zeros(4), [1, 3])
        with pytest.raises(UnannouncedGraphError) as refused:
            ours(five, [1, 3])
        with pytest.raises(UnannouncedGraphError, match=r"one more: layers \[1, 2\]"):
            ours(torch.ones(4), [1, 2])
        assert run.compiled == {"raise_ids:demo": 1}
    assert not five.any()
    message = "graphs: raise_ids:demo has 1 announced, got one more: ids [5] float32"
    assert str(refused.value) == message
    ours(torch.ones(6), [1, 3])  # outside of a run no graph is counted


@pytest.mark.parametrize("backend", ["", "eager"])
@pytest.mark.parametrize("other", [torch.ones(3).expand(2, 3), torch.ones(3, 2).mT])
def test_other_strides_count_as_another_shape(backend, other):
    device = build_counting_device(backend)
    ours = device.compile(triple)
    with device.ledger.expect_graphs([Graph("triple")], strict=True):
        ours(torch.ones(2, 3))
        ours(torch.zeros(2, 3))
        strides = f"{list(other.stride())}"
        with pytest.raises(UnannouncedGraphError, match=re.escape(f"[2, 3] float32 strides {strides}")):
            ours(other)


def test_a_shape_that_is_compiled_again_counts_and_is_named_as_such(monkeypatch):
    device = build_counting_device("eager")
    ours = device.compile(triple)
    with device.ledger.expect_graphs([Graph("triple")], strict=True) as run:
        ours(torch.ones(7))
        monkeypatch.setitem(NUMBERS, "factor", 4.0)
        with pytest.raises(UnannouncedGraphError, match=r"same shape again.*: ids \[7\] float32"):
            ours(torch.ones(7))
    assert run.compiled == {"triple": 2}


@pytest.mark.parametrize("backend", ["", "eager"])
def test_an_unannounced_graph_is_counted_and_warned_of_once_where_compiling_is_quick(backend, monkeypatch, caplog):
    def scale(ids):
        return ids * NUMBERS["factor"]

    device = build_counting_device(backend)
    ours = device.compile(scale)
    with device.expect_graphs([Graph("scale")], str) as run:
        with device.ledger.warming():
            assert ours(torch.ones(7)).sum() == 21
        assert (run.unannounced, run.compiled_late) == (0, 0)
        for size in (8, 9):
            assert ours(torch.ones(size)).sum() == 3 * size
        if backend:
            monkeypatch.setitem(NUMBERS, "factor", 4.0)
            assert ours(torch.ones(7)).sum() == 28  # the same shape again
    more = 3 if backend else 2
    assert (run.unannounced, run.compiled_late) == (more, more)
    assert run.counts() == {"scale": {"announced": 1, "compiled": 1 + more}}
    (message,) = [r.getMessage() for r in caplog.records if r.name == "models.device.graph_budget"]
    assert message.startswith("graphs: scale has 1 announced, got one more: ids [8] float32; ")


@pytest.mark.parametrize("name", ["neuron", "xla", "cuda", "cpu"])
def test_accelerators_that_compile_for_minutes_refuse_an_unannounced_graph(name):
    device = replace(CPU, name=name, counts_shapes=True, ledger=GraphLedger())
    with device.expect_graphs([], str) as run:
        assert run.strict == (name in ("neuron", "xla"))


def test_each_compiled_graph_is_reported_with_the_time_left():
    device, lines = build_counting_device("eager"), []
    ours = device.compile(triple)
    graphs = [Graph("triple", (size,)) for size in (4, 5)]
    with device.expect_graphs(graphs, lines.append):
        for size in (4, 4, 5):
            ours(torch.ones(size))
    reported = lines[1:-1]
    assert [line.partition(":")[0] for line in reported] == ["graph 1 of 2", "graph 2 of 2"]
    assert ["left" in line for line in reported] == [True, False]


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_run_compiles_the_graphs_that_it_announced():
    """In training and an evaluation, every function has its announced graphs, and none after the warm-up."""
    facts = run_module("graphs_run")
    for run in ("training", "evaluation"):
        for function, count in facts["graphs"][run].items():
            assert count["compiled"] == count["announced"], (run, function)
    assert set(facts["graphs"]["training"]) == {"run_target", "loss_terms", "evaluate_chunk"}
    assert facts["late"] == 0


@pytest.mark.system
@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name", ["mixed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("chain", "static", "product"))]
)
def test_a_warm_up_compiles_the_announced_graphs_and_the_evaluation_no_further_graph(
    tmp_path, monkeypatch, capsys, name
):
    """The rule of slow compilers ends a run at a further graph; batches of 1, 2 and 8 are decoded."""
    monkeypatch.setattr("models.device.device.SLOW_COMPILERS", ("cpu",))
    target = tiny_target(seed=0, device=build_counting_device("eager"), layers=2)
    draft = new_draft(target, layers=[0, 1])
    tree = {"chain": CHAIN, "static": STATIC, "product": PRODUCT, "mixed": TREE}[name]
    tested = DraftUnderTest(name="trained", draft=draft, untrained="there is none")
    conf = EvaluationConf(prompts=str(write_prompt_file(tmp_path)), max_new_tokens=4, batch_sizes=[2, 8], phases=False)
    compile_eval_graphs(target, [tested], tree=tree, conf=conf)
    announced, *_, compiled = capsys.readouterr().out.splitlines()
    assert announced.removesuffix("announced") == compiled.removesuffix("compiled")
    report = evaluate_drafts(target, [tested], tree=tree, conf=conf)
    assert sum(count["announced"] for count in report.setup.graphs.values()) == int(announced.split()[1])
    assert not any(count["compiled"] for count in report.setup.graphs.values())


@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["", pytest.param("eager", marks=pytest.mark.system)])
def test_ngram_lookup_in_batches_needs_the_announced_graphs(backend):
    device = build_counting_device(backend)
    target = tiny_target(seed=0, device=device, layers=2)
    decoders = [
        Decoder(target, NgramDraft(), chain(3), sampling=SamplingConf(), slots=40, batch=batch) for batch in (1, 2, 8)
    ]
    graphs = {g for decoder in decoders for g in list_graphs(decoder.session, LENGTHS[:1])}
    with device.ledger.expect_graphs(graphs, strict=True) as run:
        for decoder in decoders:
            decoder.decode(draw_texts(*[LENGTHS[0]] * 9), row_ids=range(9), max_new_tokens=8)
    assert all(count["compiled"] == count["announced"] for count in run.counts().values())


def count_eval_graphs(folder, names, *, tree, tuned=None, **conf):
    """Evaluate eagerly with counted shapes; return announced and called graphs by function."""
    target = tiny_target(seed=0, device=build_counting_device())
    few = {"prompts": str(write_prompt_file(folder)), "max_new_tokens": 4, "batch_sizes": [2]}
    drafts = [CASES[name].build(target) for name in names]
    tested = [
        DraftUnderTest(
            name=name,
            draft=draft,
            untrained=draft,
            adapted_target=draft.get_adapted_target(target),
            tuned=tuned and tuned(draft),
        )
        for name, draft in zip(names, drafts, strict=True)
    ]
    report = evaluate_drafts(target, tested, tree=tree, conf=EvaluationConf(**few | conf))
    assert report.setup.graphs_after_warmup == 0
    return report.setup.graphs


SAMPLED = SamplingConf(temperature=1.0, repetition_penalty=1.1)
CHAIN = TreeConf(kind=TreeKind.chain, depth=3)
STATIC = TreeConf(kind=TreeKind.static, paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]])
PRODUCT = TreeConf(depth=3, nodes=6, beam_width=None, children=3)


@pytest.mark.no_shapes
@pytest.mark.parametrize(
    ("names", "tree", "conf"),
    [
        (["medusa", "medusa2", "hass"], TREE, {}),
        (["eagle3", "medusa"], CHAIN, {"batch_sizes": [2, 8]}),
        (["eagle3"], STATIC, {"batch_sizes": [2, 8]}),
        (["draft model"], CHAIN, {"sampling": SAMPLED, "verification": Verification.rejection}),
        (["hydra"], TREE, {"sampling": SAMPLED, "verification": Verification.typical}),
    ],
)
def test_drafts_side_by_side_need_the_announced_graphs(tmp_path, names, tree, conf):
    for function, count in count_eval_graphs(tmp_path, names, tree=tree, **conf).items():
        assert count["compiled"] == count["announced"], function


@pytest.mark.no_shapes
@pytest.mark.parametrize(
    ("name", "tuned"),
    [
        ("medusa2", lambda _: TunedDecoding(description="none", draft=None, tree=NO_TREE)),
        ("hass", lambda _: TunedDecoding(description="copies", draft=NgramDraft(), tree=chain(6))),
        ("hass", lambda draft: TunedDecoding(description="small", draft=draft, tree=mixed())),
    ],
)
def test_the_tuned_mode_needs_the_announced_graphs(tmp_path, name, tuned):
    for function, count in count_eval_graphs(tmp_path, [name], tree=CHAIN, tuned=tuned).items():
        assert count["compiled"] == count["announced"], function


def test_own_answers_and_features_in_memory_have_the_announced_shapes():
    device = build_counting_device()
    target = tiny_target(seed=0, device=device)
    names = ("run_target", "loss_terms", "evaluate_chunk")
    for case, data in (
        ("draft model", {"on_policy": OnPolicyConf(share=0.5, interval=2)}),
        ("medusa", {"keep_features": True}),  # ten rows in groups of four: the last is filled up
    ):
        conf = toy_conf(draft=CASES[case].conf, optim={"steps": 4})
        conf.data = DataConf(row_length=LENGTH, **data)
        counted = run_loop(conf, CASES[case].build(target), target, device)
        assert counted.counts() == {name: {"announced": 1, "compiled": 1} for name in names}


def test_a_lazy_device_compiles_full_steps_as_announced(monkeypatch):
    """A stand-in for PyTorch/XLA fails if a graph begins within another."""
    open_graphs, called = [], set()

    @contextmanager
    def compile(full_graph, name):
        assert full_graph
        assert not open_graphs
        open_graphs.append(name)
        yield
        called.add(open_graphs.pop())

    metrics = {"counter_value": lambda _: len(called)}
    for module, parts in (
        ("torch_xla", {"compile": compile, "sync": lambda wait=False: None}),
        ("torch_xla.debug", {"metrics": SimpleNamespace(**metrics)}),
    ):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[module]).update(parts)
    lazy = {"name": "xla", "compiles": True, "ledger": GraphLedger()}
    device = XlaDevice(**vars(CPU) | lazy)
    target = tiny_target(seed=0, device=device)
    for case, data in (("eagle3", {}), ("medusa", {"keep_features": True})):
        called.clear()
        conf = toy_conf(draft=CASES[case].conf, optim={"steps": 4})
        conf.data = DataConf(row_length=LENGTH, **data)
        counted = run_loop(conf, CASES[case].build(target), target, device)
        names = {graph.function for graph in graph_plan.list_graphs(conf, lazy=True)}
        assert called == names
        assert counted.counts() == {name: {"announced": 1, "compiled": 1} for name in names}


def test_unannounced_graphs_of_training_stand_in_its_metrics(tmp_path):
    """The arguments of this method change their shape after the second step."""

    class Growing(MedusaDraft):
        def prepare_batch(self, batch, *, step, generators):
            return {"grown": torch.ones(1 if step < 2 else 2)}

        def loss_terms(self, batch, target_output, grown):
            return super().loss_terms(batch, target_output)

    device = build_counting_device()
    target = tiny_target(seed=0, device=device)
    conf = toy_conf(draft=CASES["medusa"].conf, optim={"steps": 4})
    conf.data, conf.interval.log = DataConf(row_length=LENGTH), 1
    draft = Growing(conf.draft, Growing.engine_config(conf.draft, target), target)
    counted = run_loop_in(tmp_path, conf, draft, target, device)
    assert counted.counts()["loss_terms"] == {"announced": 1, "compiled": 2}
    assert [line["train/graphs_unannounced"] for line in metrics(tmp_path)] == [0, 0, 1, 1]


def test_a_warm_up_calls_every_shape_of_training_and_evaluation(tmp_path, caplog, capsys):
    """It runs on dummy rows, reports each graph with its time, and writes no run folder."""
    target = tiny_target(seed=0)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    evaluation = EvaluationConf(prompts=str(write_prompt_file(tmp_path)), max_new_tokens=4, batch_sizes=[2])
    conf = toy_conf(
        draft=CASES["eagle3"].conf,
        tree=TREE,
        evaluation=evaluation,
        target=TargetConf(name=str(tmp_path / "target")),
        output_dir=str(tmp_path / "runs"),
    )
    conf.data = DataConf(row_length=LENGTH)
    (tmp_path / "scratch").mkdir()
    with caplog.at_level(logging.INFO):
        parallel = build_parallel(conf.parallel, build_counting_device(), trackers=[])
        compile_training_graphs(conf, parallel, tmp_path / "scratch", decodes=True)
    lines = [*caplog.messages, *capsys.readouterr().out.splitlines()]
    training, judging = (i for i, line in enumerate(lines) if line.endswith("announced"))
    assert lines[training].removesuffix("announced") == "graphs: 3 (evaluate_chunk 1, loss_terms 1, run_target 1) "
    for first in (training, judging):
        announced = lines[first].removesuffix("announced")
        assert f"{announced}compiled" in lines[first:]
        progress_lines = [line for line in lines[first:] if line.startswith("graph ")]
        assert len(progress_lines) >= int(announced.split()[1])
        assert [line for line in progress_lines if not PROGRESS.fullmatch(line) or len(line) > 100] == []
    assert not (tmp_path / "runs").exists()


def test_a_warm_up_compiles_for_a_first_stage_what_training_runs_of_it(tmp_path, caplog, capsys):
    """Nothing decodes with the heads of a first stage."""
    save_target(tmp_path / "target", max_position_embeddings=128)
    conf = toy_conf(
        draft=Medusa2Conf(heads=2, heads_steps=2),
        tree=TreeConf(kind=TreeKind.chain, depth=2),
        evaluation=EvaluationConf(prompts=str(write_prompt_file(tmp_path)), max_new_tokens=4),
        target=TargetConf(path=str(tmp_path / "target")),
        output_dir=str(tmp_path / "runs"),
    )
    conf.data = DataConf(row_length=LENGTH)
    with caplog.at_level(logging.INFO):
        warm_up_run(conf, build_parallel(conf.parallel, build_counting_device(), trackers=[]))
    lines = [*caplog.messages, *capsys.readouterr().out.splitlines()]
    announced = [line for line in lines if line.endswith("announced")]
    assert ["loss_terms" in line for line in announced] == [True, True, False]


def test_drafts_of_equal_tensors_and_other_switches_have_graphs_of_their_own():
    target = tiny_target(seed=0)
    switches = [{}, {"norm_before_residual": False}, {"norm_output": True}]
    assert len({graph_key_of(new_draft(target, **switch)) for switch in switches}) == 3


@pytest.mark.system
def test_processes_of_a_split_target_warm_up_with_one_checkpoint_of_which_nothing_is_left(tmp_path):
    save_target(tmp_path / "target", max_position_embeddings=128)
    prompts, output_dir = write_prompt_file(tmp_path), tmp_path / "runs"
    launch_script("../commands/split_warmup_run.py", tmp_path / "target", prompts, output_dir, processes=2)
    assert list(output_dir.iterdir()) == []


@pytest.mark.slow
def test_a_run_after_its_warm_up_has_every_graph_in_the_cache(tmp_path):
    """The compiler's cache on disk has every graph; tracing is repeated."""

    def counts(what):
        return run_module("warmup_run", what, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))

    first, then = counts("warm"), counts("judge")
    assert first["miss"] > 0
    assert then["graphs"] == first["graphs"]
    assert (then["miss"], then["bypass"]) == (0, 0)


# --- steps ------------------------------------------------------------------------------------
