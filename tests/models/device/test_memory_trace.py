"""Operators that PyTorch's fake tensors do not know are traced with the shapes that they have."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.device.memory_trace import fake_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_traced_in_every_precision(dtype):
    experts = nn.ParameterList([nn.Parameter(torch.empty(4, 16, 32, dtype=dtype, device="meta"))])
    with fake_model([experts], vocab=[]) as tracer, tracer.trace_phase("experts") as phase:
        rows = torch.empty(24, 16, dtype=dtype)
        ends = torch.tensor([6, 12, 18, 24], dtype=torch.int32)
        result = F.grouped_mm(rows, experts[0], offs=ends)
    assert (result.shape, result.dtype) == ((24, 32), dtype)
    assert phase.flops_by_dtype[dtype] == 2 * 24 * 16 * 32


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
