"""Train with a change that has not earned an option; scripts/studies/eagle3.py measures them.

    python -m scripts.studies.variants ema draft=demo optim.steps=400

A variant replaces one function of the run and leaves the rest of `python -m train` as it is:

    ema         judge an exponential moving average of the weights instead of the last ones
    last_layer  start the draft's layer as the target's last layer
    by_length   visit rows of short documents first, in every epoch
    ngram_hard  tokens that n-gram lookup would have proposed have no loss
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.packing import sampler
from data.packing.documents import Packed
from models.drafts.base import Batch
from models.drafts.eagle3 import Eagle3Draft
from models.targets.target import Target
from train.__main__ import main as train
from train.trainer import Trainer

EMA_DECAY = 0.98  # an average over the last 50 steps
NGRAM = 2  # tokens that must occur before, as in the mixed tree's lookup


def average_weights() -> None:
    """Keep an average of the weights from the first step on, and judge and save it at the end."""
    take_step, evaluate = Trainer.optimizer_step, Trainer._evaluate_draft
    averages: dict[int, list[Tensor]] = {}

    def take_step_and_average(self: Trainer, micro_batches: dict) -> None:
        take_step(self, micro_batches)
        weights = [parameter.detach() for parameter in self.trained]
        averaged = averages.setdefault(id(self), [weight.clone() for weight in weights])
        for average, weight in zip(averaged, weights, strict=True):
            average.lerp_(weight, 1 - EMA_DECAY)

    @torch.no_grad()
    def evaluate_average(self: Trainer) -> dict[str, float]:
        weights = [parameter.clone() for parameter in self.trained]
        _assign(self.trained, averages[id(self)])
        values = evaluate(self)
        _assign(self.trained, weights)
        return values

    Trainer.optimizer_step, Trainer._evaluate_draft = take_step_and_average, evaluate_average


def start_from_last_layer() -> None:
    """Copy the target's last layer, whose queries, keys and values then read the feature alone."""
    copy_weights = Eagle3Draft.copy_target_weights

    @torch.no_grad()
    def copy_with_layer(self: Eagle3Draft, target: Target, kept_ids: Tensor | None = None) -> None:
        copy_weights(self, target, kept_ids)
        source = target.decoder.layers[-1].state_dict()
        for name, weight in self.midlayer.state_dict().items():
            given = source.get(name.replace("hidden_norm", "input_layernorm"))
            if given is not None and weight.shape == given.shape:
                weight.copy_(given)
            elif given is not None and weight.shape[0] == given.shape[0]:
                weight[:, -given.shape[1] :].copy_(given)

    Eagle3Draft.copy_target_weights = copy_with_layer


def order_by_length() -> None:
    """Visit the rows from the last to the first: rows of long documents are packed first."""

    def reverse_rows(rows: int, _seed: int, _epoch: int) -> np.ndarray:
        return np.arange(rows)[::-1]

    sampler._shuffle_rows = reverse_rows


def skip_copied_tokens() -> None:
    """Let tokens that a lookup of the last tokens would have proposed count as context."""
    build = Packed.batch

    def build_without_copies(self: Packed, rows: list[int]) -> Batch:
        batch = build(self, rows)
        return replace(batch, context_mask=find_copied_tokens(batch))

    Packed.batch = build_without_copies


def find_copied_tokens(batch: Batch) -> Tensor:
    """Return which tokens follow the latest earlier occurrence of the tokens before them."""
    copied = torch.zeros_like(batch.answer_mask)
    for row, (ids, document) in enumerate(zip(batch.input_ids.tolist(), batch.document_ids.tolist(), strict=True)):
        following: dict[tuple[int, ...], int] = {}
        for place in range(NGRAM, len(ids)):
            key = (document[place], *ids[place - NGRAM : place])
            if document[place - NGRAM] == document[place]:
                copied[row, place] = following.get(key) == ids[place]
                following[key] = ids[place]
    return copied


def _assign(parameters: list[Any], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


VARIANTS: dict[str, Callable[[], None]] = {
    "ema": average_weights,
    "last_layer": start_from_last_layer,
    "by_length": order_by_length,
    "ngram_hard": skip_copied_tokens,
}

if __name__ == "__main__":
    VARIANTS[sys.argv.pop(1)]()
    train()
