"""What the target sees in packed rows, brought into the form of a shard.

The pass is training's own (data/features/target_pass.py). What it gives is quantised where it was
computed, so that a fraction of it has to travel to the host. The batches of a shard depend on
nothing but the plan: captured again, it is the same bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from data.features.plan import Plan
from data.features.quantize import dequantise, quantise, rounding
from data.features.schema import SCALE, Layout, TeacherKind
from data.features.target_pass import target_pass
from models.distill.topk_logits import TopK
from models.drafts.base import Batch
from models.errors import UserError
from models.target.target import Target

ROUNDING = ".rounding"  # behind the name of what was rounded; not stored
AT_ONCE = 256  # positions whose logits are held together


class Capture:
    """Takes the features of a plan's rows, shard by shard."""

    def __init__(self, target: Target, plan: Plan, *, batch: int):
        self.target, self.plan, self.batch = target, plan, batch
        device = target.device
        self._pass = target_pass(target, compiled=not device.lazy)
        self._look: Callable[[Batch], dict[str, Tensor]] = device.glue(self.look)

    @torch.no_grad()
    def look(self, batch: Batch) -> dict[str, Tensor]:
        """Every part of the layout, at every position."""
        layout = self.plan.layout
        seen = self._pass(self.target, layout.layers, batch)
        found: dict[str, Tensor] = {}
        if layout.layers:
            states = seen.captured.unflatten(-1, (len(layout.layers), layout.hidden_size))
            found |= compressed("captured", states, layout)
        if any(part.name == "hidden" for part in layout.parts):
            found |= compressed("hidden", seen.hidden, layout)
        if layout.teacher is TeacherKind.topk:
            found |= self._likeliest(seen.hidden)
        return found

    def _likeliest(self, hidden: Float[Tensor, "rows length hidden"]) -> dict[str, Tensor]:
        k = self.plan.layout.top_k
        chunks = hidden.flatten(0, 1).split(AT_ONCE)
        found = [TopK.of(self.target.logits(chunk), k) for chunk in chunks]
        kinds = {"ids": torch.int32, "log_probs": torch.float16, "rest": torch.float32}
        return {
            f"teacher.{name}": torch.cat([getattr(one, name) for one in found])
            .to(kind)
            .unflatten(0, hidden.shape[:2])
            for name, kind in kinds.items()
        }

    def shard(
        self, number: int, step: Callable[[int, int], None]
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
        """A shard, and how far it is rounded; `step` is told of done rows and tokens."""
        tokens, taught = self.plan.counts[number].tolist()
        count = {part.name: tokens if part.every else taught for part in self.plan.layout.parts}
        room = {
            part.name: torch.empty((count[part.name], *part.shape), dtype=part.dtype)
            for part in self.plan.layout.parts
        }
        filled = dict.fromkeys(room, 0)
        sums = dict.fromkeys(room, torch.zeros(2).double())
        rows = self.plan.rows(number)
        for first in range(0, len(rows), self.batch):
            some = rows[first : first + self.batch]
            looked = self._host(some)
            places, taught_places = map(torch.from_numpy, self.plan.stored(some))
            for part in self.plan.layout.parts:
                name, chosen = part.name, places if part.every else taught_places
                room[name][filled[name] :][: len(chosen)] = _rows(looked[name], chosen)
                filled[name] += len(chosen)
                if name + ROUNDING in looked:
                    sums[name] = sums[name] + looked[name + ROUNDING][chosen].double().sum(0)
            step(len(some), len(places))
        return room, self._said({name: sums[name] / count[name] for name in room})

    def _host(self, rows: list[int]) -> dict[str, Tensor]:
        """What is seen in these rows end to end, and in some more: all batches share a graph."""
        full = [(rows[0] + i) % len(self.plan.packed) for i in range(self.batch)]
        batch = self.plan.packed.batch(full).to(self.target.device.torch_device)
        return {name: part.cpu().flatten(0, 1) for name, part in self._look(batch).items()}

    def _said(self, means: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        """By layer, in words. Raises UserError where the target's numbers are not finite."""
        layers = [f"layer {layer}" for layer in self.plan.layout.layers]
        named: list[tuple[str, Any]] = []
        if layers:
            named += zip(layers, means["captured"].tolist(), strict=True)
        if "hidden" in means:
            named.append(("final", means["hidden"].tolist()))
        for name, (squared, _) in named:
            if not np.isfinite(squared):
                raise UserError(
                    f"device.precision: features must be finite, got others at {name} of the "
                    "target; choose another precision"
                )
        return {name: {"relative": squared**0.5, "lost": lost} for name, (squared, lost) in named}


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """`values[chosen]`, which PyTorch 2.9 does not have for fp8 on the host."""
    as_bytes = values.view(torch.int8) if values.itemsize == 1 else values
    return as_bytes[chosen].view(values.dtype)


def compressed(
    name: str, states: Float[Tensor, "*batch width"], layout: Layout
) -> dict[str, Tensor]:
    """Values, scales and what rounding cost each row."""
    values, scale = quantise(states, layout.dtype)
    error = rounding(states, dequantise(values, scale))
    scales = {} if scale is None else {name + SCALE: scale}
    return {name: values, name + ROUNDING: error} | scales
