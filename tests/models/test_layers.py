"""The parts of a draft's layer compute the same on every route."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from data.features.target_pass import run_target
from models import layers
from models.drafts.loss import LossModule
from models.layers import RMSNorm, attend
from models.meta_model import collect_models
from models.targets.attention import without_kernel
from tests.support.models.methods import CASES, QUICK
from tests.support.models.tiny import CPU, batch_of, sampled_texts

RECOMPUTING = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name, case in CASES.items()
    if case.conf.has_layers
]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_prompts_attend_in_chunks_as_at_once(monkeypatch, kv_heads):
    monkeypatch.setattr(layers, "CHUNK", 5)
    numbers = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 13, 8, generator=numbers)
    key, value = (torch.randn(2, kv_heads, 16, 8, generator=numbers) for _ in range(2))
    mask = (torch.arange(16) <= torch.arange(13)[:, None]).expand(2, 1, -1, -1)
    lengths = []

    def count_queries(query, *args, **kwargs):
        lengths.append(query.shape[2])
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(layers.F, "scaled_dot_product_attention", count_queries)
    with torch.no_grad():
        at_once = attend(query, key, value, mask)
        with without_kernel():
            in_chunks = attend(query, key, value, mask)
    assert lengths == [13, 5, 5, 3]
    torch.testing.assert_close(in_chunks, at_once)


def find_gradients(draft, target, batch, *, compiled: bool) -> list[torch.Tensor]:
    device = replace(CPU, compiles=compiled, backend="aot_eager")
    loss = LossModule(draft, device, compiled=compiled)
    loss(batch, run_target(target, draft.needs.layers, batch), {}).total.backward()
    gradients = [p.grad.clone() for p in draft.parameters() if p.requires_grad]
    draft.zero_grad()
    return gradients


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.no_shapes, pytest.mark.system])])
@pytest.mark.parametrize("name", RECOMPUTING)
def test_layers_that_run_again_in_the_backward_pass_give_the_same_gradients(target, name, compiled):
    draft = CASES[name].build(target).eval()
    batch = batch_of(sampled_texts(target, count=2, length=24))
    calls = []
    modules = [module for model in collect_models(draft) for module in model.modules() if is_mlp(module)]
    hooks = [module.register_forward_pre_hook(lambda *_: calls.append(1)) for module in modules]
    kept = find_gradients(draft, target, batch, compiled=False)
    num_calls = len(calls)
    draft.recomputes = True
    again = find_gradients(draft, target, batch, compiled=False)
    assert len(calls) == 3 * num_calls > 0  # once, and twice
    for hook in hooks:
        hook.remove()
    assert all(map(torch.equal, again, kept))
    if compiled:
        torch._dynamo.reset()
        for gradient, expected in zip(find_gradients(draft, target, batch, compiled=True), kept, strict=True):
            torch.testing.assert_close(gradient, expected)


def is_mlp(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("MLP")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_norm_has_the_gradients_of_autograd_and_keeps_its_input_alone(dtype, bound, has_grad):
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(2, 3, 5, 64).to(dtype)
    x.requires_grad_(has_grad)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        actual = norm(x)
    assert kept == [x.numel(), 64, x.numel() // 64]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    expected = normed.to(dtype) * norm.weight.to(dtype)
    assert torch.equal(actual, expected)
    leaves = [norm.weight, x] if has_grad else [norm.weight]
    for ours, plain in zip(*(torch.autograd.grad(y, leaves, grad) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(ours, plain, atol=bound * plain.abs().max().item(), rtol=0)
