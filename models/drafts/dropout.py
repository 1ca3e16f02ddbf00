"""Dropout whose choices are drawn on the host, row by row, so that every layout drops the same."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor


def draw_kept_inputs(
    generators: list[np.random.Generator], shape: tuple[int, int], *, dropout: float
) -> Bool[Tensor, "b t inputs"]:
    """Return which inputs of each row's positions are kept.

    Numbers of 16 bits decide, which are drawn several times as fast as floating-point ones.
    """
    first_kept = round(dropout * 2**16)
    drawn = [generator.integers(2**16, size=shape, dtype=np.uint16) for generator in generators]
    return torch.from_numpy(np.stack([numbers >= first_kept for numbers in drawn]))


def drop_inputs(
    inputs: Float[Tensor, "b t inputs"], kept: Bool[Tensor, "b t inputs"] | None, *, dropout: float
) -> Float[Tensor, "b t inputs"]:
    """Zero the inputs that are not kept, and scale the others so that the mean stays."""
    return inputs if kept is None else inputs * kept / (1 - dropout)
