"""A pass over a few tokens attends as transformers does, and reads keys from the cache without copies."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models.targets.attention import attend_grouped
from tests.support.models.cached import read_prompts, read_tree
from tests.support.models.watching import LargestTensor

GROUPS, HEADS, SLOTS, WIDTH = 3, 2, 40, 16
PROMPTS = [[5, 9, 2, 7, 7, 3, 11], [4, 8]]


class AttentionModule(nn.Module):
    """The attributes that the attention of transformers reads of its module."""

    num_key_value_groups, is_causal = GROUPS, True


def draw_tensors(tokens, batch=2):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, GROUPS * HEADS, tokens, WIDTH), *[(batch, HEADS, SLOTS, WIDTH)] * 2]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    visible = torch.rand((batch, 1, tokens, SLOTS), generator=generator) < 0.5
    return query, key, value, torch.zeros(visible.shape).masked_fill(~visible, -1e4)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("tokens", [1, 5, WIDTH, WIDTH + 1])
def test_heads_attend_as_in_transformers(tokens, scaling):
    """Each query head reads the keys of its own group, under its row's and token's own mask."""
    query, key, value, mask = draw_tensors(tokens)
    ours, _ = attend_grouped(AttentionModule(), query, key, value, mask, scaling=scaling)
    theirs, _ = sdpa_attention_forward(AttentionModule(), query, key, value, mask, scaling=scaling)
    torch.testing.assert_close(ours, theirs)


def test_a_boolean_mask_for_all_rows_equals_a_mask_of_numbers_for_each_row():
    """`generate` builds such masks for itself."""
    query, key, value, mask = draw_tensors(tokens=5)
    shared = mask[:1] == 0
    ours, _ = attend_grouped(AttentionModule(), query, key, value, shared)
    theirs, _ = attend_grouped(AttentionModule(), query, key, value, mask[:1].expand(2, -1, -1, -1))
    torch.testing.assert_close(ours, theirs)


def test_a_bias_of_each_head_is_added_by_transformers():
    query, key, value, mask = draw_tensors(tokens=5)
    bias = torch.randn(1, GROUPS * HEADS, 5, SLOTS, generator=torch.Generator().manual_seed(0))
    ours, _ = attend_grouped(AttentionModule(), query, key, value, mask, position_bias=bias)
    theirs, _ = attend_grouped(AttentionModule(), query, key, value, mask + bias)
    torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_without_a_mask_a_prompt_is_causal():
    query, key, value, _ = draw_tensors(tokens=8)
    ours, _ = attend_grouped(AttentionModule(), query, key[:, :, :8], value[:, :, :8], None)
    causal = torch.full((8, 8), -1e4).triu(1)[None, None].expand(2, 1, 8, 8)
    theirs, _ = attend_grouped(AttentionModule(), query, key[:, :, :8], value[:, :, :8], causal)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("nodes", [1, 5])
@torch.no_grad()
def test_a_verification_makes_no_copy_of_the_cache_for_each_head(target, nodes):
    text = target.config
    cache = target.new_cache(len(PROMPTS), SLOTS)
    lengths, _ = read_prompts(target, cache, PROMPTS, 8)
    ids = torch.full((len(PROMPTS), nodes), 3)
    parents = torch.arange(-1, nodes - 2).expand(len(PROMPTS), -1)
    with LargestTensor(text.head_dim) as seen:
        read_tree(target, cache, lengths, ids, parents)
    assert text.num_attention_heads > text.num_key_value_heads
    assert seen.numel == cache.keys[0].numel()
