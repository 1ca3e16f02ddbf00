"""Read prompts and trees into a static cache, as the runtime does."""

import torch

from models.targets.cache import CacheMoves, CacheWrite, prompt_mask, tree_mask
from models.trees.growth import ancestor_mask, node_depths
from tests.support.models.tiny import LAYERS


def read_prompts(target, cache, prompts, padded, layers=LAYERS):
    ids = torch.zeros(len(prompts), padded, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    positions = torch.arange(padded).expand_as(ids)
    seen = target.forward_hidden(
        ids,
        positions=positions,
        mask=prompt_mask(lengths, padded, cache.num_slots),
        layers=layers,
        cache=cache,
        write=CacheWrite(slots=positions),
    )
    return lengths, seen


def read_tree(target, cache, lengths, ids, parents, *, source=None, goal=None, layers=LAYERS):
    sees = ancestor_mask(parents)
    positions = lengths[:, None] + torch.arange(ids.shape[1])
    moves = None if source is None else CacheMoves(source=source, destination=goal)
    return target.forward_hidden(
        ids,
        positions=lengths[:, None] + node_depths(sees),
        mask=tree_mask(lengths, sees, cache.num_slots),
        layers=layers,
        cache=cache,
        write=CacheWrite(slots=positions, moves=moves),
    ).hidden
