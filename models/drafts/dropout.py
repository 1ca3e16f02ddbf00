"""Dropout whose choices are drawn on the host, row by row, so that every layout drops the same."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor


def draw_kept_inputs(
    generators: list[np.random.Generator], shape: tuple[int, int], *, dropout: float
) -> Bool[Tensor, "b t inputs"]:
    """Return which inputs of each row's positions are kept."""
    kept = [generator.random(shape, dtype=np.float32) >= dropout for generator in generators]
    return torch.from_numpy(np.stack(kept))


def drop_inputs(
    inputs: Float[Tensor, "b t inputs"], kept: Bool[Tensor, "b t inputs"] | None, *, dropout: float
) -> Float[Tensor, "b t inputs"]:
    """Zero the inputs that are not kept, and scale the others so that the mean stays."""
    return inputs if kept is None else inputs * kept / (1 - dropout)
