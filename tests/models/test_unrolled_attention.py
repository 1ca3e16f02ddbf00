"""The attention of the training-time test: values, gradients and memory, in both of its forms.

Axes: B rows, H query heads, K key-value heads, T positions, S keys, D head size.
"""

import pytest
import torch

from models import unrolled_attention
from models.unrolled_attention import attend_unrolled, without_kernel

DOCUMENTS = torch.tensor([0] * 5 + [1] * 6 + [-1] * 2)  # packed, and padding
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


@pytest.fixture(params=["kernel", "chunks of 1", "chunks of 4", "one chunk"])
def form(request, monkeypatch):
    """Take PyTorch's kernel, or what other devices than CPUs run."""
    if request.param == "kernel":
        yield
        return
    sizes = {"chunks of 1": 1, "chunks of 4": 4, "one chunk": 256}
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


def attend_written_out(query, keys, values, mask):
    """One softmax over the T keys of step 0 and the own keys of later steps."""
    keys, values = ([x.repeat_interleave(HEADS // KV_HEADS, 1) for x in part] for part in (keys, values))
    scale, length = HEAD_SIZE**-0.5, query.shape[2]
    dense = (query @ keys[0].mT * scale).masked_fill(~mask, -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    shares = torch.cat([dense, *own], -1).softmax(-1)
    later = zip(shares[..., length:].split(1, -1), values[1:], strict=False)
    return shares[..., :length] @ values[0] + sum(share * value for share, value in later)


def with_gradients(attend, query, keys, values, mask):
    """The output, and the gradients of a fixed weighting of it in all inputs."""
    out = attend(query, keys, values, mask)
    numbers = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=numbers, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [query, *keys, *values], weights)]


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_values_and_gradients_are_those_of_one_softmax(form, steps):
    inputs = draw_inputs(steps)
    expected = with_gradients(attend_written_out, *inputs)
    for found, exact in zip(with_gradients(attend_unrolled, *inputs), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_the_exact_gradients(form, dtype):
    inputs = draw_inputs(4, dtype=dtype)
    query, keys, values, mask = inputs
    exact = [x.detach().double().requires_grad_() for x in (query, *keys, *values)]
    expected = with_gradients(attend_written_out, exact[0], exact[1:5], exact[5:], mask)
    tolerance = 8 * torch.finfo(dtype).eps
    for found, wanted in zip(with_gradients(attend_unrolled, *inputs), expected, strict=True):
        assert found.dtype == dtype
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that the forward pass keeps, each storage once, boolean masks left out."""

    def __init__(self):
        self.storages = {}
        super().__init__(self.note, lambda tensor: tensor)

    def note(self, tensor):
        if tensor.dtype != torch.bool:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def test_memory_that_is_kept_grows_linearly_with_the_row(form):
    kept = []
    for length in (64, 128):
        query, keys, values, mask = draw_inputs(3, documents=torch.zeros(length))
        saved = SavedBytes()
        with saved:
            outs = [attend_unrolled(query, keys[:n], values[:n], mask) for n in (1, 2, 3)]
        assert len(outs) == 3
        kept.append(sum(saved.storages.values()))
    assert kept[1] == 2 * kept[0]


@pytest.mark.no_shapes  # checks of types would break the graph
def test_the_gradients_compile_into_one_graph(monkeypatch):
    """What accelerators run has no break and no value that the host reads."""
    monkeypatch.setattr(unrolled_attention, "CHUNK", 4)
    inputs = draw_inputs(3, dtype=torch.float32)
    compiled = torch.compile(attend_unrolled, backend="aot_eager", fullgraph=True, dynamic=False)
    with without_kernel():
        expected = with_gradients(attend_unrolled, *inputs)
        found = with_gradients(compiled, *inputs)
    for tensor, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, plain)
