"""ZeRO-1: each process holds the optimizer moments of its shard of every weight, and updates it.

Weights are sharded along the first axis; the last shards are padded. Five rows on three processes:

    0 1 | 2 3 | 4 .

An engine reduces gradients, updates the shards and gathers the weights. Checkpoints hold the
moments of full weights, as plain AdamW does, so that any number of processes can resume, with
ZeRO-1 or without.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.optim import AdamW


def shard_rows(
    tensor: Float[Tensor, "rows ..."], *, ranks: int, rank: int
) -> Float[Tensor, "shard_rows ..."]:
    """Return the rows of one process, padded with zeros.

    >>> import torch
    >>> [shard_rows(torch.arange(1.0, 6.0), ranks=3, rank=rank).tolist() for rank in range(3)]
    [[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]
    """
    rows = -(-len(tensor) // ranks)
    missing = rows * ranks - len(tensor)
    padded = F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing])
    return padded.narrow(0, rank * rows, rows)


class ShardedAdamW(AdamW):
    """AdamW whose moments are sharded from `shard_moments` on.

    It keeps the parameter groups, so schedules act on it as before.
    """

    engine: Any = None
    gather: Callable[[Tensor], Tensor]

    def shard_moments(
        self, engine: Callable[..., Any], gather: Callable[[Tensor], Tensor], *,
        ranks: int, rank: int,
    ) -> None:  # fmt: skip
        """Shard the loaded moments, and take all further steps with `engine`."""
        options = {name: self.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.gather = gather
        # the groups are shared, so that schedules still set the learning rate
        self.engine = engine(
            self.param_groups, AdamW, grad_clipping=False, pin_layout=False,
            save_master_weights=True, **options,
        )  # fmt: skip
        for weight, shard in self._weight_shard_pairs():
            if moments := self.state.pop(weight, None):
                self.engine.base_optimizer.state[shard] = {
                    name: shard_rows(value, ranks=ranks, rank=rank).to(shard.device).clone()
                    if value.ndim
                    else value.cpu()
                    for name, value in moments.items()
                }

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.engine is None else self.engine.step(closure)

    def gather_moments(self) -> None:
        """Gather the moments of full weights to the host; collective."""
        for weight, shard in self._weight_shard_pairs():
            self.state[weight] = {
                name: self.gather(value)[: len(weight)].cpu() if value.ndim else value.cpu()
                for name, value in self.engine.base_optimizer.state[shard].items()
            }

    def free_moments(self) -> None:
        self.state.clear()

    def _weight_shard_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with this process's shard of it."""
        shard_groups = self.engine.base_optimizer.param_groups
        for weights, shards in zip(self.param_groups, shard_groups, strict=True):
            yield from zip(weights["params"], shards["params"], strict=True)
