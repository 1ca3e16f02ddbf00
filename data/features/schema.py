"""What a feature store holds of each token, and how many bytes that takes.

A row of features belongs to a token. Inputs of methods that read context have one for every token,
those of other methods, and every teacher, for supervised tokens alone: those of an answer, and
those whose next token is.

    captured             L x H     inputs     the layers that enter the draft
    hidden               H         inputs, or supervised: it teaches as well
    teacher.ids          k int32   supervised     teacher=topk: the k likeliest tokens,
    teacher.log_probs    k fp16    supervised     their log-probabilities at temperature 1
    teacher.rest         fp32      supervised     and the mass of all others
"""

from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from data.features.quantize import Dtype
from models.drafts.base import Needs

SCALE = ".scale"  # behind the name of what it scales


class TeacherKind(Enum):
    """In which form the target's distribution is kept."""

    hidden = "hidden"  # the final hidden state, of which the head makes it: exact but for rounding
    topk = "topk"  # the k likeliest tokens and the mass of the rest


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a shard."""

    name: str
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    every: bool  # a row for each token; else for supervised ones alone

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a method takes from the target, as a store keeps it."""

    layers: list[int]
    hidden: bool  # the final hidden state is an input
    context: bool  # inputs of every token
    dtype: Dtype
    teacher: TeacherKind
    top_k: int  # of teacher=topk
    hidden_size: int
    vocab_size: int

    @classmethod
    def read(cls, saved: dict[str, Any]) -> "Layout":
        kinds = {"dtype": Dtype(saved["dtype"]), "teacher": TeacherKind(saved["teacher"])}
        return cls(**saved | kinds)

    def saved(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": self.dtype.value, "teacher": self.teacher.value}

    @property
    def parts(self) -> list[Part]:
        """Every tensor of a shard."""
        found = []
        if self.layers:
            found += self._states("captured", (len(self.layers),), every=self.context)
        if self.hidden or self.teacher is TeacherKind.hidden:
            found += self._states("hidden", (), every=self.hidden and self.context)
        if self.teacher is TeacherKind.topk:
            for name, shape, dtype in (
                ("ids", (self.top_k,), torch.int32),
                ("log_probs", (self.top_k,), torch.float16),
                ("rest", (), torch.float32),
            ):
                found.append(Part(name=f"teacher.{name}", shape=shape, dtype=dtype, every=False))
        return found

    def _states(self, name: str, rows: tuple[int, ...], *, every: bool) -> list[Part]:
        values = Part(
            name=name, shape=(*rows, self.hidden_size), dtype=self.dtype.torch, every=every
        )
        scales = Part(name=name + SCALE, shape=rows, dtype=torch.float32, every=every)
        return [values] if self.dtype.largest is None else [values, scales]

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of every token, and of a supervised one besides."""
        every = sum(part.row_bytes for part in self.parts if part.every)
        return every, sum(part.row_bytes for part in self.parts) - every

    def bytes(self, tokens: int, supervised: int) -> int:
        """Of features."""
        every, more = self.row_bytes
        return every * tokens + more * supervised

    def lacks(self, needs: Needs) -> str | None:
        """What a method needs and this has not; None where it has all."""
        if needs.layers and needs.layers != self.layers:
            return f"captured layers {needs.layers}, got {self.layers or 'none'}"
        if needs.layers and needs.context and not self.context:
            return "captured layers of every token, got those of supervised tokens"
        if needs.hidden and not (self.hidden or self.teacher is TeacherKind.hidden):
            return "the final hidden state, got none"
        if needs.hidden and needs.context and not (self.hidden and self.context):
            return "the final hidden state of every token, got that of supervised tokens"
        return None
