"""Collectives gather and reduce a layer's weight at a time, each once in a step."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.parallel.dtensor import is_sharded
from tests.support.models.watching import WatchedOperators
from train.distributed.units import count_largest_bytes, shard_in_units

PROCESSES = 4
IDS = torch.arange(6)[None]
TABLE, LAYER, NORM = 40 * 16, 16 * 16 + 16, 2 * 16


class UnrolledDraft(nn.Module):
    """A draft that calls its layer three times, and reads its head without a call."""

    def __init__(self, *, tied: bool = False):
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 16)
        self.fc, self.norm, self.lm_head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        for _ in range(3):
            hidden = self.norm(self.fc(hidden))
        return F.linear(hidden, self.lm_head.weight).square().mean()


@pytest.fixture
def mesh():
    """Return a mesh of processes of which only the first exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield init_device_mesh("cpu", (PROCESSES,))
    dist.destroy_process_group()


def watch_collectives(module: nn.Module) -> dict[str, list[int]]:
    """Return the numbers that each collective of a forward and backward pass has in all processes together."""
    sizes: dict[str, list[int]] = {}

    def watch(func, args, output):
        if func.namespace == "c10d":
            numels = [arg.numel() for arg in args if isinstance(arg, torch.Tensor)]
            sizes.setdefault(func.__name__.split("_base")[0].strip("_"), []).append(max(numels))

    with WatchedOperators(watch):
        module(IDS).backward()
    return sizes


@pytest.mark.parametrize(
    ("tied", "frozen", "gathered", "reduced"),
    [
        (False, False, [TABLE, LAYER, TABLE, NORM], [TABLE, LAYER, TABLE, NORM]),
        (True, False, [TABLE, LAYER, NORM], [TABLE, LAYER, NORM]),
        (False, True, [TABLE, LAYER, TABLE, NORM], [LAYER, TABLE, NORM]),
    ],
)
def test_each_unit_is_gathered_and_reduced_once_in_a_step(mesh, tied, frozen, gathered, reduced):
    draft = UnrolledDraft(tied=tied)
    draft.embed_tokens.weight.requires_grad_(not frozen)
    shard_in_units(draft, mesh, dtype=torch.float32)
    for _ in range(2):
        sizes = watch_collectives(draft)
        assert sorted(sizes["allgather"]) == sorted(gathered)
        assert sorted(sizes["reduce_scatter"]) == sorted(reduced)
        assert all(is_sharded(parameter) for parameter in draft.parameters())
        assert all((parameter.grad is not None) == parameter.requires_grad for parameter in draft.parameters())


@torch.no_grad()
def test_a_pass_without_gradients_leaves_only_shards(mesh: DeviceMesh):
    """What stayed gathered would be stale after the next step of the optimizer."""
    draft = UnrolledDraft()
    shard_in_units(draft, mesh, dtype=torch.float32)
    draft(IDS)
    assert all(is_sharded(parameter) for parameter in draft.parameters())


@pytest.mark.parametrize(("frozen", "embedding"), [(False, torch.float32), (True, torch.bfloat16)])
def test_all_but_norms_and_trained_embeddings_are_gathered_in_the_precision_of_the_run(mesh, frozen, embedding):
    draft = UnrolledDraft()
    draft.embed_tokens.weight.requires_grad_(not frozen)
    assert count_largest_bytes(draft, torch.bfloat16) == TABLE * embedding.itemsize
    shard_in_units(draft, mesh, dtype=torch.bfloat16)
    seen = {}
    draft.norm.register_forward_hook(lambda *_: seen.update({n: p.dtype for n, p in draft.named_parameters()}))
    with torch.autocast("cpu", torch.bfloat16):
        draft(IDS).backward()
    assert seen == {
        "embed_tokens.weight": embedding,
        **dict.fromkeys(("fc.weight", "fc.bias", "lm_head.weight"), torch.bfloat16),
        **dict.fromkeys(("norm.weight", "norm.bias"), torch.float32),
    }
    assert {parameter.grad.dtype for parameter in draft.parameters() if parameter.requires_grad} == {torch.float32}
