"""The attention of targets: PyTorch's own, which reads keys once for all query heads of a group.

Masks are numbers that are added to the scores, here and in drafts. `transformers` copies keys and
values for each query head in most passes; here the query heads of a group are put side by side, as
if they were more tokens. See docs/decoding.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Added to the score of a key that a query may not attend to: its weight is exactly 0, as by -inf,
# which not every compiler computes with. bf16 has this number.
MASKED_SCORE = -1e9
CHUNK = 128  # queries whose scores are in memory at a time, where no kernel takes the mask
KERNEL_DEVICES = {"cpu"}  # whose attention takes a mask and returns log-sum-exps
GROUPED_SDPA = "grouped_sdpa"  # its name among the attention implementations of transformers


@contextmanager
def without_kernel() -> Iterator[None]:
    """Let drafts attend in chunks on CPUs too, for plans of other machines and for tests."""
    before = KERNEL_DEVICES.copy()
    KERNEL_DEVICES.clear()
    try:
        yield
    finally:
        KERNEL_DEVICES.update(before)


def attention_bias(mask: Bool[Tensor, "*batch t s"], dtype: torch.dtype) -> Float[Tensor, "*batch t s"]:
    """Return what is added to the scores of keys: 0 where `mask` is True, else MASKED_SCORE."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, MASKED_SCORE)


def attend_grouped(
    module: nn.Module,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b kv s d"],
    value: Float[Tensor, "b kv s v"],
    attention_mask: Shaped[Tensor, "#b masks t s"] | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "b t h v"], None]:
    """Return softmax attention with grouped heads.

    A mask of numbers is added to the scores, one of bools lets a query attend where it is True. The
    mask is copied for each query head of a group. Beyond as many tokens as a head has channels, as
    in prompts, that would cost more than copies of the keys, which transformers then makes.
    """
    # A graph of prompts of any length must not depend on their length.
    is_short = statically_known_true(query.shape[2] <= key.shape[3])
    is_folded = query.shape[1] != key.shape[1] and is_short
    has_options = any(options.get(name) is not None for name in ("softcap", "position_bias"))
    has_options = has_options or options.get("dropout", 0.0) > 0
    if attention_mask is None or attention_mask.shape[1] != 1 or has_options or not is_folded:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return attend_folded(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def attend_folded(
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b kv s d"],
    value: Float[Tensor, "b kv s v"],
    mask: Shaped[Tensor, "#b 1 t s"],
    scaling: float | None = None,
) -> Float[Tensor, "b h t v"]:
    """Return softmax attention in which the query heads of a group are so many more tokens of one head."""
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, -1, groups * tokens, size)
    output = F.scaled_dot_product_attention(folded, key, value, mask.repeat(1, 1, groups, 1), scale=scaling)
    return output.reshape(batch, heads, tokens, -1)


ALL_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, attend_grouped)
# The masks that `generate` makes for itself are those of scaled dot-product attention.
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
