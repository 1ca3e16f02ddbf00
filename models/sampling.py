"""How tokens are sampled: one rule, and one source of noise, for target and draft alike.

A token is the argmax of the warped logits plus Gumbel noise, which samples their softmax exactly.
The noise is a function of (seed, row id, turn, position, token) alone. Target and draft add the
same noise, so that they tend to choose the same token, and the output depends on the target and the
key but not on what was drafted: https://arxiv.org/abs/2408.07978.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.errors import UserError

MASK = 0xFFFFFFFF


@dataclass(kw_only=True)
class SamplingConf:
    """Temperature 0 takes the likeliest token; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"sampling.temperature: must not be negative, got {self.temperature}; "
                "0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(
                f"sampling.top_k: must not be negative, got {self.top_k}; 0 keeps every token"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"sampling.top_p: must be in (0, 1], got {self.top_p}; 1 keeps every token"
            )

    def build(self) -> "SamplingRule":
        return SamplingRule(self)


class SamplingRule:
    """What is done to logits before a token is chosen."""

    def __init__(self, conf: SamplingConf):
        self.conf = conf
        self.seed = conf.seed
        self.greedy = conf.temperature == 0

    def warp(self, logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Temperature, then top-k, then top-p, as in transformers; -inf is never sampled.

        A greedy rule only makes them fp32: no warping changes which token is likeliest.
        """
        scores = logits.float()
        if self.greedy:
            return scores
        scores = scores / self.conf.temperature
        if self.conf.top_k:
            least = scores.topk(min(self.conf.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.conf.top_p < 1:
            ordered, order = scores.sort(dim=-1)
            unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - self.conf.top_p
            unlikely[..., -1] = False  # the likeliest token always stays
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), -math.inf)
        return scores

    def scores(
        self, logits: Float[Tensor, "*rows vocab"], noise: Float[Tensor, "*rows vocab"] | None
    ) -> Float[Tensor, "*rows vocab"]:
        """Their largest is the token, the lowest id among equals. Greedy rules have no noise."""
        return self.warp(logits) if noise is None else self.warp(logits) + noise


def gumbel(
    seed: int,
    row_ids: Int[Tensor, " batch"],
    turn: int | Int[Tensor, " batch"],
    positions: Int[Tensor, "batch positions"],
    vocab_ids: Int[Tensor, " vocab"],
) -> Float[Tensor, "batch positions vocab"]:
    """Standard Gumbel noise of these tokens at these positions: a hash, without any state.

    `vocab_ids` are target ids, so that a reduced draft vocabulary gets the target's own noise.
    """
    outer, inner = (
        _key(start, seed, row_ids, turn, positions)[..., None] for start in (0x9E3779B9, 0x85EBCA6B)
    )
    bits = _mix(outer ^ _mix(inner ^ (vocab_ids & MASK)))  # two keys of 32 bits: no collisions
    # The upper tail decides what is sampled. It is where `rest` is small, which fp32 resolves.
    rest = ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-rest))


def _key(
    start: int, seed: int, row_ids: Tensor, turn: int | Tensor, positions: Tensor
) -> Int[Tensor, "batch positions"]:
    key = torch.full_like(row_ids, start ^ (seed & MASK))
    for word in (seed >> 32, row_ids, row_ids >> 32, turn):
        key = _mix(key) + word & MASK
    return _mix(_mix(key)[:, None] + positions & MASK)


def _mix(bits: Tensor) -> Tensor:
    """An integer hash of 32 bits, bijective and without visible bias.

    Constants from https://github.com/skeeto/hash-prospector. Both are below 2^31, so that no
    product overflows int64: overflow is undefined in compiled code.
    """
    bits = bits ^ (bits >> 16)
    bits = bits * 0x21F0AAAD & MASK
    bits = bits ^ (bits >> 15)
    bits = bits * 0x735A2D97 & MASK
    return bits ^ (bits >> 15)
