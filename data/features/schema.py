"""Schema of a feature store: the tensors that it holds for each token, and their bytes.

A row of features belongs to a token. The inputs of methods that read context have a row for every
token. The inputs of other methods, and every teacher, have rows for supervised tokens only: the
tokens of an answer and the token before each of them.

    captured             L x H     inputs         the layers that enter the draft
    hidden               H         inputs, or supervised: teacher=hidden
    teacher.ids          k int32   supervised     teacher=topk: the k likeliest tokens,
    teacher.log_probs    k fp16    supervised     their log-probabilities at temperature 1
    teacher.rest         fp32      supervised     and the mass of all others
"""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

import torch

from data.features.quantize import Dtype
from models.drafts.base import Needs

SCALE_SUFFIX = ".scale"  # follows the name of the scaled tensor


class TeacherKind(Enum):
    """The form in which the target's distribution is stored."""

    hidden = "hidden"  # the final hidden state, for the target's head: exact but for rounding
    topk = "topk"  # the k likeliest tokens and the mass of the rest


class TensorSpec(NamedTuple):
    """The name, shape and type of one tensor of a shard."""

    name: str
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    per_token: bool  # a row for each token; otherwise for supervised tokens only


@dataclass(frozen=True, kw_only=True)
class FeatureSchema:
    """The features that a store holds of each token, and their storage types."""

    layers: list[int]
    hidden: bool  # the final hidden state is an input
    context: bool  # inputs of every token
    dtype: Dtype
    teacher: TeacherKind
    top_k: int  # of teacher=topk
    hidden_size: int
    vocab_size: int

    @property
    def tensor_specs(self) -> list[TensorSpec]:
        """List the tensors of a shard."""
        specs = []
        if self.layers:
            specs += self._hidden_state_specs("captured", len(self.layers), per_token=self.context)
        if self.hidden or self.teacher is TeacherKind.hidden:
            specs += self._hidden_state_specs("hidden", per_token=self.hidden and self.context)
        if self.teacher is TeacherKind.topk:
            specs += [
                TensorSpec("teacher.ids", (self.top_k,), torch.int32, per_token=False),
                TensorSpec("teacher.log_probs", (self.top_k,), torch.float16, per_token=False),
                TensorSpec("teacher.rest", (), torch.float32, per_token=False),
            ]
        return specs

    def _hidden_state_specs(self, name: str, *rows: int, per_token: bool) -> list[TensorSpec]:
        values = TensorSpec(name, (*rows, self.hidden_size), self.dtype.torch_dtype, per_token)
        scales = TensorSpec(name + SCALE_SUFFIX, rows, torch.float32, per_token)
        return [values] if self.dtype.max_value is None else [values, scales]

    def num_bytes(self, tokens: int, supervised: int) -> int:
        """Compute the bytes of the features of `tokens`, of which `supervised` are supervised."""
        return sum(
            (tokens if spec.per_token else supervised) * prod(spec.shape) * spec.dtype.itemsize
            for spec in self.tensor_specs
        )

    def describe_missing(self, needs: Needs) -> str | None:
        """Describe what a method needs and this schema lacks; None where it has everything."""
        problems = {
            f"captured layers {needs.layers}, got {self.layers or 'none'}": (
                needs.layers and needs.layers != self.layers
            ),
            "captured layers of every token, got those of supervised tokens": (
                needs.layers and needs.context and not self.context
            ),
            "the final hidden state, got none": (
                needs.hidden and not (self.hidden or self.teacher is TeacherKind.hidden)
            ),
            "the final hidden state of every token, got that of supervised tokens": (
                needs.hidden and needs.context and not (self.hidden and self.context)
            ),
        }
        return next((problem for problem, exists in problems.items() if exists), None)
