"""Prompts and trees read into a static cache, as the runtime does."""

import torch

from models.speculate.tree import ancestors, depths
from models.target.cache import Write, prompt_mask, tree_mask
from tests.support.tiny import LAYERS


def read_prompts(target, cache, prompts, padded, layers=LAYERS):
    ids = torch.zeros(len(prompts), padded, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    place = torch.arange(padded).expand_as(ids)
    seen = target.see(
        ids, positions=place, mask=prompt_mask(lengths, padded, cache.garbage + 1), layers=layers,
        cache=cache, write=Write.at(place),
    )  # fmt: skip
    return lengths, seen


def read_tree(
    target, cache, lengths, ids, parents, *, active=True, source=None, goal=None, layers=LAYERS
):
    sees = ancestors(parents)
    place = lengths[:, None] + torch.arange(ids.shape[1])
    slots = place if active else torch.full_like(place, cache.garbage)
    moves = source is not None
    return target.see(
        ids, positions=lengths[:, None] + depths(sees),
        mask=tree_mask(lengths, sees, cache.garbage + 1), layers=layers, cache=cache,
        write=Write(slots=slots, source=source, goal=goal) if moves else Write.at(slots),
    ).hidden  # fmt: skip
