"""What is traced has the shapes and the counts of what it stands for."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Qwen3MoeConfig

from infer.engine.decode import Decoder
from models.device.memory_trace import MemoryTracer, fake_model
from models.meta_model import MetaTarget, build_meta_draft
from models.trees.sampling_config import SamplingConf
from tests.support.data.chat import save
from tests.support.models.family_models import FAMILIES, WINDOW
from tests.support.models.tiny import CPU
from tests.support.reports.memory_run import KINDS, PROMPT, build_conf, build_target
from tests.support.reports.planned import GENEROUS, model_outline, trace_alone
from train.planning.layout import build_layout
from train.planning.run_plan import build_models
from train.planning.trace import TARGET_PASS, trace_run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_traced_in_every_precision(dtype):
    experts = nn.ParameterList([nn.Parameter(torch.empty(4, 16, 32, dtype=dtype, device="meta"))])
    with fake_model([experts], vocab=[]) as tracer, tracer.trace_phase("experts") as phase:
        rows = torch.empty(24, 16, dtype=dtype)
        ends = torch.tensor([6, 12, 18, 24], dtype=torch.int32)
        result = F.grouped_mm(rows, experts[0], offs=ends)
    assert (result.shape, result.dtype) == ((24, 32), dtype)
    assert phase.flops_by_dtype[dtype] == 2 * 24 * 16 * 32


@pytest.mark.parametrize("held", [8, 2])
@pytest.mark.parametrize(("rows", "share"), [(1, 1 / 8), (4096, 1.0)])
def test_experts_count_as_far_as_rows_choose_them_and_a_core_holds_them(held, rows, share):
    """A row reads one expert of eight; four cores that share them multiply a quarter of the rows each."""
    model, other = nn.Module(), nn.Module()
    model.config, other.config = Qwen3MoeConfig(num_experts=8), Qwen3MoeConfig(num_experts=128)
    model.experts = nn.Parameter(torch.empty(held, 16, 32, device="meta"))
    with fake_model([other, model], vocab=[]) as tracer, tracer.trace_phase("experts") as phase:
        tracer.label_tensors("target", [model.experts])
        F.grouped_mm(torch.empty(rows, 16), model.experts, offs=torch.zeros(held, dtype=torch.int32))
    assert phase.flops_by_dtype[torch.float32] == 2 * rows * 16 * 32 * held // 8
    assert phase.bytes_read["target"] == pytest.approx(share * held * 16 * 32 * 4)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "gpt_oss"])  # with windows, experts, and both
def test_equal_layers_are_traced_once_and_counted_as_if_each_was_traced(monkeypatch, family):
    """The inputs of two layers are kept for a draft, so that the peak is that of a later layer."""
    once, num_computed, _ = trace_prompt(family)
    monkeypatch.setattr(MemoryTracer, "run_layer", lambda _, function, layer, *args: function(layer, *args))
    each, num_computed_alone, num_layers = trace_prompt(family)
    assert (num_computed, num_computed_alone) == (1, num_layers)
    assert once == each


@pytest.mark.parametrize(("length", "rows"), [(256, 2), (512, 4)])  # a layer's weights take more, or its activations
def test_equal_layers_of_a_sharded_target_count_as_if_each_was_traced(tmp_path, monkeypatch, length, rows):
    save(build_target(CPU), tmp_path)
    once = trace_sharded(tmp_path, length, rows)
    monkeypatch.setattr(MemoryTracer, "run_layer", lambda _, function, layer, *args: function(layer, *args))
    assert once == pytest.approx(trace_sharded(tmp_path, length, rows), rel=1e-3)


def trace_sharded(target, length, rows):
    """Return the bytes of a target's pass in one of four processes that share it."""
    words = (f"target.path={target}", f"optim.rows_per_step={4 * rows}", f"optim.micro_batch_size={rows}")
    run = build_conf(*KINDS["eagle3"], "parallel=sharded", f"data.row_length={length}", *words)
    layout = build_layout(run, replace(GENEROUS, chips=1, cores=4), 4, 1)
    return trace_run(run, *build_models(run, CPU.dtype), layout, prompt_tokens=PROMPT)[TARGET_PASS].peak_bytes.total()


def test_equal_layers_of_a_draft_model_are_computed_each_where_gradients_are_taken():
    run = build_conf(*KINDS["draft model"], "draft.layers=[0,1,2,3]")
    target = model_outline(CPU)
    draft, computed = build_meta_draft(run.draft, target, loss=run.loss), []
    for layer in draft.lm.decoder.layers:
        layer.self_attn.register_forward_hook(lambda *_: computed.append(torch.is_grad_enabled()))
    trace_alone(run, target, draft, prompt_tokens=PROMPT)
    assert computed.count(True) == 4
    assert computed.count(False) < 4 * 2  # of an evaluation's passes


def trace_prompt(family):
    """Return the phase of a prompt of a model of the family, how many layers were computed, and how many it has."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    target, computed = MetaTarget(model, name=family, device=CPU), []
    for layer in target.decoder.layers:
        layer.self_attn.register_forward_hook(lambda *_: computed.append(1))
    with torch.no_grad(), fake_model([model], vocab=[target.vocab_size]) as tracer:
        tracer.label_tensors("target", model.parameters())
        decoder = Decoder(target, sampling=SamplingConf(), slots=64, layers=[1, 3])
        with tracer.trace_phase("prompt") as phase:
            decoder.decode([[1] * 2 * WINDOW], row_ids=[0], max_new_tokens=1)
    return phase, len(computed), target.num_layers


@pytest.mark.parametrize("scores_in_memory", [False, True])
def test_scores_of_attention_count_where_no_kernel_takes_a_mask(scores_in_memory):
    heads, tokens = 4, 256
    with (
        fake_model([], vocab=[], scores_in_memory=scores_in_memory) as tracer,
        tracer.trace_phase("attention") as phase,
    ):
        query = torch.empty(1, heads, tokens, 8)
        mask = torch.empty(1, 1, tokens, tokens)
        attended = F.scaled_dot_product_attention(query, query, query, mask)
    assert attended.shape == query.shape
    scores = heads * tokens * tokens * 4
    assert (phase.peak_bytes.total() - mask.nbytes > scores) == scores_in_memory
