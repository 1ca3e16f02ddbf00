"""The attention of the training-time test has exact values and gradients, and linear memory, in both forms.

Axes: B rows, H query heads, K key-value heads, T positions, S keys, D head size.
"""

import pytest
import torch

from models import unrolled_attention
from models.targets.attention import without_kernel
from models.unrolled_attention import attend_unrolled

DOCUMENTS = torch.tensor([0] * 5 + [1] * 6 + [-1] * 2)  # two packed documents, and padding
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


@pytest.fixture(params=["kernel", "chunks of 1", "chunks of 4", "single chunk"])
def form(request, monkeypatch):
    """Take PyTorch's kernel, or the chunks that devices other than CPUs run."""
    if request.param == "kernel":
        yield
        return
    sizes = {"chunks of 1": 1, "chunks of 4": 4, "single chunk": 256}
    monkeypatch.setattr(unrolled_attention, "CHUNK", sizes[request.param])
    with without_kernel():
        yield


def draw_inputs(steps, *, dtype=torch.float64, documents=DOCUMENTS):
    numbers = torch.Generator().manual_seed(steps)
    length = len(documents)
    query, *rest = (
        torch.randn(2, heads, length, HEAD_SIZE, generator=numbers, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in [HEADS] + [KV_HEADS] * 2 * steps
    )
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (causal & (documents[:, None] == documents)).expand(2, 1, length, length)
    return query, rest[:steps], rest[steps:], mask


def attend_by_definition(query, keys, values, mask):
    """Compute a single softmax over the T keys of step 0 and the own keys of later steps."""
    keys, values = ([x.repeat_interleave(HEADS // KV_HEADS, 1) for x in part] for part in (keys, values))
    scale, length = HEAD_SIZE**-0.5, query.shape[2]
    dense = (query @ keys[0].mT * scale).masked_fill(~mask, -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    shares = torch.cat([dense, *own], -1).softmax(-1)
    later = zip(shares[..., length:].split(1, -1), values[1:], strict=False)
    return shares[..., :length] @ values[0] + sum(share * value for share, value in later)


def compute_with_gradients(attend, query, keys, values, mask):
    """Compute the output, and the gradients of a fixed weighting of it in all inputs."""
    out = attend(query, keys, values, mask)
    numbers = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=numbers, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [query, *keys, *values], weights)]


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_values_and_gradients_are_those_of_a_single_softmax(form, steps):
    inputs = draw_inputs(steps)
    expected = compute_with_gradients(attend_by_definition, *inputs)
    for actual, exact in zip(compute_with_gradients(attend_unrolled, *inputs), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_the_exact_gradients(form, dtype):
    inputs = draw_inputs(4, dtype=dtype)
    query, keys, values, mask = inputs
    exact = [x.detach().double().requires_grad_() for x in (query, *keys, *values)]
    expected = compute_with_gradients(attend_by_definition, exact[0], exact[1:5], exact[5:], mask)
    tolerance = 8 * torch.finfo(dtype).eps
    for actual, reference in zip(compute_with_gradients(attend_unrolled, *inputs), expected, strict=True):
        assert actual.dtype == dtype
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that the forward pass saves, each storage once, without boolean masks."""

    def __init__(self):
        self.storages = {}
        super().__init__(self.note, lambda tensor: tensor)

    def note(self, tensor):
        if tensor.dtype != torch.bool:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def test_saved_memory_grows_linearly_with_the_row(form):
    saved_bytes = []
    for length in (64, 128):
        query, keys, values, mask = draw_inputs(3, documents=torch.zeros(length))
        saved = SavedBytes()
        with saved:
            outs = [attend_unrolled(query, keys[:n], values[:n], mask) for n in (1, 2, 3)]
        assert len(outs) == 3
        saved_bytes.append(sum(saved.storages.values()))
    assert saved_bytes[1] == 2 * saved_bytes[0]


@pytest.mark.no_shapes  # checks of types would break the graph
def test_the_gradients_compile_into_a_single_graph(monkeypatch):
    """The form that accelerators run has no graph break and no value that the host reads."""
    monkeypatch.setattr(unrolled_attention, "CHUNK", 4)
    inputs = draw_inputs(3, dtype=torch.float32)
    compiled = torch.compile(attend_unrolled, backend="aot_eager", fullgraph=True, dynamic=False)
    with without_kernel():
        expected = compute_with_gradients(attend_unrolled, *inputs)
        actual = compute_with_gradients(compiled, *inputs)
    for tensor, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, plain)
