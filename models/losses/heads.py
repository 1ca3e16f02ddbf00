"""The vocabulary heads of a loss: whole, or the rows of them that each process holds.

    hidden states of all processes x own rows of the heads  ->  exchange  ->  whole logits of own hidden states

Gradients go back the same way, so that no process gathers a head or reduces its gradient. All processes must pass
equal numbers of chunks, of one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, pad

from models.parallel.dtensor import is_sharded, local_part


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One head for all steps, or one for each of them, and their gradients so far in fp32; a frozen head has None."""

    weights: tuple[Float[Tensor, "vocab width"], ...]
    grads: tuple[Float[Tensor, "vocab width"] | None, ...]

    def compute_logits(self, hidden: Float[Tensor, "*steps tokens width"]) -> tuple[Tensor, Tensor]:
        """Return the logits [*steps, tokens, vocab], and what `backpropagate` takes."""
        return apply_heads(self.weights, hidden), hidden

    def backpropagate(self, grad: Float[Tensor, "*steps tokens vocab"], inputs: Tensor) -> Tensor:
        """Add the gradients of the heads to `grads`, in place; return that of the hidden states."""
        pairs = [(grad, inputs)] if len(self.weights) == 1 else zip(grad, inputs, strict=True)
        for head_grad, (logit_grad, head_input) in zip(self.grads, pairs, strict=True):
            if head_grad is not None:
                head_grad += logit_grad.flatten(0, -2).T @ head_input.flatten(0, -2)
        return apply_heads([head.T for head in self.weights], grad)

    def finish_grads(self) -> None:
        """Let `grads` be what autograd is to have, in place, after the last chunk."""


@dataclass(frozen=True, kw_only=True)
class SplitHeads(Heads):
    """Heads of which each process holds as many rows, the last ones perhaps fewer; `group` is that of all of them."""

    group: Any
    ranks: int
    vocab: int

    @property
    def part(self) -> int:
        """Return the number of rows of a process."""
        return -(-self.vocab // self.ranks)  # rounded up

    def compute_logits(self, hidden: Float[Tensor, "*steps tokens width"]) -> tuple[Tensor, Tensor]:
        gathered = collectives.all_gather_single(hidden.contiguous(), 0, self.group)
        logits, inputs = super().compute_logits(torch.cat(gathered.chunk(self.ranks), -2))
        padded = pad(logits, (0, self.part - logits.shape[-1]))
        return self._exchange(padded, -2, -1)[..., : self.vocab], inputs

    def backpropagate(self, grad: Float[Tensor, "*steps tokens vocab"], inputs: Tensor) -> Tensor:
        padded = pad(grad, (0, self.part * self.ranks - self.vocab))
        own = self._exchange(padded, -1, -2)[..., : len(self.weights[0])]
        partial = super().backpropagate(own, inputs)
        # A reduction would add in the type of products, and round as often as there are processes.
        parts = self._send(partial, -2).unflatten(0, (self.ranks, -1))
        return parts.sum(0, dtype=torch.float32).to(partial.dtype)

    def finish_grads(self) -> None:
        """Divide sums over the tokens of all processes by their number: FSDP2 gives means for other weights, too."""
        for grad in self.grads:
            if grad is not None:
                grad.div_(self.ranks)

    def _exchange(self, values: Tensor, split: int, join: int) -> Tensor:
        """Send each process its part along the axis `split`; return the parts of all along the axis `join`."""
        return torch.cat(self._send(values, split).chunk(self.ranks), join)

    def _send(self, values: Tensor, split: int) -> Tensor:
        """Send each process its part along the axis `split`; return the parts of all, one after the other."""
        sent = torch.cat(values.chunk(self.ranks, split))
        return collectives.all_to_all_single(sent, None, None, self.group)


def build_heads(weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Heads:
    """Build the heads of a loss, which add to `grads`; weights that are DTensors, and their gradients, are rows."""
    own_weights = tuple(_autocast(local_part(weight).detach()) for weight in weights)
    own_grads = tuple(grad if grad is None else local_part(grad) for grad in grads)
    if not is_sharded(weights[0]):
        return Heads(weights=own_weights, grads=own_grads)
    mesh = cast(Any, weights[0]).device_mesh
    group = {"group": mesh.get_group().group_name, "ranks": mesh.size(), "vocab": len(weights[0])}
    return SplitHeads(weights=own_weights, grads=own_grads, **group)


def allocate_grads(weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Return zeros in fp32, split as the weights are, for those that learn; nothing does without autograd."""
    learns = torch.is_grad_enabled()
    return [torch.zeros_like(w, dtype=torch.float32) if learns and w.requires_grad else None for w in weights]


def apply_heads(heads: Sequence[Tensor], hidden: Float[Tensor, "*steps tokens _"]) -> Tensor:
    """Return the product of all steps with a shared head, or of each step with its own head."""
    if len(heads) == 1:
        return linear(hidden, heads[0])
    return torch.stack([linear(step, head) for step, head in zip(hidden, heads, strict=True)])


def _autocast(head: Tensor) -> Tensor:
    """Return a head in the type of products, to which autocast would convert it for every chunk."""
    kind = head.device.type
    return head.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else head
