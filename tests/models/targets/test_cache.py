"""The static cache holds the keys and values of transformers' growing cache."""

import torch
from transformers import DynamicCache

from models.targets.cache import CacheMoves, CacheWrite, write_layer
from models.targets.modeling import find_cache_name
from tests.support.models.cached import read_prompts, read_tree

SLOTS = 40
PROMPT = [5, 9, 2, 7, 7, 3, 11]
# root and two branches:        root  0   1   2   3   4
TREE = torch.tensor([[13, 21, 22, 23, 24, 25]])
PARENTS = torch.tensor([[-1, -1, 0, 1, 2]])


def compute_hidden(target, ids):
    """Compute hidden states by transformers, token by token over its own cache."""
    cache, hidden = DynamicCache(config=target.config), []
    name = find_cache_name(target.decoder.forward)
    for token in ids:
        output = target.decoder(torch.tensor([[token]]), use_cache=True, **{name: cache})
        hidden.append(output.last_hidden_state[0, 0])
    return torch.stack(hidden)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_pass_over_the_first_slots_writes_them_alone(target):
    full, narrow = target.new_cache(1, SLOTS), target.new_cache(1, SLOTS)
    _, expected = read_prompts(target, full, [PROMPT], 8)
    _, seen = read_prompts(target, narrow.first_slots(8), [PROMPT], 8)
    assert_close(seen.hidden, expected.hidden)
    assert torch.equal(narrow.positions, full.positions)
    for ours, theirs in zip(narrow.keys + narrow.values, full.keys + full.values, strict=True):
        assert_close(ours, theirs)


@torch.no_grad()
def test_a_smaller_length_rolls_the_cache_back(target):
    cache = target.new_cache(1, SLOTS)
    lengths, _ = read_prompts(target, cache, [PROMPT], 8)
    read_tree(target, cache, lengths, TREE, PARENTS)
    hidden = read_tree(target, cache, lengths - 2, TREE[:, :2], PARENTS[:, :1])
    assert_close(hidden[0], compute_hidden(target, [*PROMPT[:5], 13, 21])[-2:])


def test_a_pass_moves_before_it_writes_and_reads_before_it_moves(target):
    cache = target.new_cache(2, 6)
    cache.keys[0][:] = torch.arange(7.0)[:, None]
    write = CacheWrite(
        slots=torch.tensor([[3], [6]]),
        moves=CacheMoves(source=torch.tensor([[2, 3], [6, 6]]), destination=torch.tensor([[1, 2], [6, 6]])),
    )
    new = torch.full_like(cache.keys[0][:, :, :1], 9)
    keys, _ = write_layer(cache.layer_args(0, write), new, new)
    assert keys[0, 0, :, 0].tolist() == [0, 2, 3, 9, 4, 5, 6]
    assert keys[1, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 9]
