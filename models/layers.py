"""Parts of a Llama-shaped draft layer: single device, static shapes, fp32 norms.

Axes: B rows, H heads, T queries, S keys, D head size.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models.targets.attention import CHUNK, KERNEL_DEVICES, attend_folded, attention_bias
from models.targets.modeling import build_mlp


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 under any autocast."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return _Normalize.apply(x, self.weight, self.eps)


class _Normalize(torch.autograd.Function):
    """`RMSNorm` whose gradient needs the input alone, where autograd's would keep it in fp32 and normed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grads[0].float()
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        grad = grad * weight
        along = (grad * normed).mean(-1, keepdim=True)
        return (scale * (grad - normed * along)).to(x.dtype), weight_grad, None


def apply_rope(
    x: Float[Tensor, "b h t d"], cos: Float[Tensor, "b t d"], sin: Float[Tensor, "b t d"]
) -> Float[Tensor, "b h t d"]:
    """Return `x` with rotary position embedding in the half-split layout of Llama and Qwen."""
    left, right = x.chunk(2, -1)
    rotated = torch.cat([-right, left], -1)
    return (x * cos[:, None] + rotated * sin[:, None]).to(x.dtype)


def attend(
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b kv s d"],
    value: Float[Tensor, "b kv s d"],
    mask: Bool[Tensor, "b 1 t s"],
) -> Float[Tensor, "b h t d"]:
    """Return softmax attention with grouped key-value heads; True in `mask` lets a query attend.

    With gradients the heads are repeated: CUDA's kernels for training that take a mask take no groups, and its fallback
    keeps a T x S matrix of scores for each head. For one token in bf16, PyTorch's grouped attention takes a CPU four
    times as long as folded heads do. Prompts attend in chunks where no kernel may take the mask.
    """
    bias = attention_bias(mask, query.dtype)
    if torch.is_grad_enabled():
        key, value = spread_heads(key, query), spread_heads(value, query)
    elif query.shape[2] == 1:
        return attend_folded(query, key, value, bias)
    is_grouped, tokens = query.shape[1] != key.shape[1], query.shape[2]
    size = CHUNK if not torch.is_grad_enabled() and query.device.type not in KERNEL_DEVICES else tokens
    outputs = [
        F.scaled_dot_product_attention(q, key, value, b, enable_gqa=is_grouped)
        for q, b in zip(query.split(size, 2), bias.split(size, 2), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def spread_heads(x: Float[Tensor, "b kv s d"], query: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h s d"]:
    """Return key-value heads, each repeated for the query heads of its group."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


class Attention(nn.Module):
    """Projections of Llama attention, from `width` features per token; callers run the softmax."""

    def __init__(self, config: Any, width: int):
        super().__init__()
        self.head_dim = config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def project_qkv(
        self, x: Float[Tensor, "b t width"], rope: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b kv t d"], Float[Tensor, "b kv t d"]]:
        split = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (part(x).view(split).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rope(query, *rope), apply_rope(key, *rope), value


class DecoderLayer(nn.Module):
    """A Llama layer in two parts, before and after its attention, which the caller computes."""

    def __init__(self, config: Any, *, width: int | None = None, input_norm: bool = True):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, width or size)
        self.mlp = build_mlp(config)
        self.input_layernorm = RMSNorm(size, eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(size, eps)

    def finish(self, hidden: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]) -> Float[Tensor, "b t h"]:
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Layer(DecoderLayer):
    """The layer of EAGLE-3, whose attention reads the normed embedding and feature side by side."""

    def __init__(self, config: Any):
        super().__init__(config, width=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def init_normal(*parts: nn.Module) -> None:
    """Redraw all linear weights in place from N(0, 0.02^2), as most language models do."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)


def draw_dropout(
    generators: list[np.random.Generator], shape: tuple[int, int], *, dropout: float
) -> dict[str, Bool[Tensor, "b t inputs"]]:
    """Return, as `dropout_mask`, which inputs of each row's positions dropout keeps; nothing without dropout.

    They are drawn on the host, row by row, so that every layout drops the same. Numbers of 16 bits
    decide, which are drawn several times as fast as floating-point ones.
    """
    if not dropout:
        return {}
    first_passing = round(dropout * 2**16)
    drawn = [generator.integers(2**16, size=shape, dtype=np.uint16) for generator in generators]
    return {"dropout_mask": torch.from_numpy(np.stack([numbers >= first_passing for numbers in drawn]))}


def drop_inputs(
    inputs: Float[Tensor, "b t inputs"], dropout_mask: Bool[Tensor, "b t inputs"] | None, *, dropout: float
) -> Float[Tensor, "b t inputs"]:
    """Zero the inputs that are not kept, and scale the others so that the mean stays."""
    return inputs if dropout_mask is None else inputs * dropout_mask / (1 - dropout)
