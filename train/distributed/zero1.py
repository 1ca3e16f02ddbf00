"""ZeRO-1: each process keeps the moments of its share of every weight, and moves that share.

Shares are cut along the first axis; the last ones are padded. Five rows on three processes:

    0 1 | 2 3 | 4 .

An engine reduces gradients, moves the shares and gathers the weights. What is saved and loaded are
the moments of whole weights, as plain AdamW has them, so that any number of processes can go on,
with ZeRO-1 or without.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.optim import AdamW


def share(whole: Float[Tensor, "rows ..."], *, ranks: int, rank: int) -> Float[Tensor, "share ..."]:
    """The rows of one process.

    >>> import torch
    >>> [share(torch.arange(1.0, 6.0), ranks=3, rank=rank).tolist() for rank in range(3)]
    [[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]
    """
    rows = -(-len(whole) // ranks)
    missing = rows * ranks - len(whole)
    padded = F.pad(whole, [0, 0] * (whole.ndim - 1) + [0, missing])
    return padded.narrow(0, rank * rows, rows)


class SpreadAdamW(AdamW):
    """AdamW, until `begin` spreads its moments. Weights and schedules are its own throughout."""

    engine: Any = None
    gather: Callable[[Tensor], Tensor]

    def begin(
        self, engine: Callable[..., Any], gather: Callable[[Tensor], Tensor], *,
        ranks: int, rank: int,
    ) -> None:  # fmt: skip
        """Let an engine take the steps, from the moments that were loaded on."""
        options = {name: self.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.gather = gather
        # the groups are shared, so that schedules go on setting the rate
        self.engine = engine(
            self.param_groups, AdamW, grad_clipping=False, pin_layout=False,
            save_master_weights=True, **options,
        )  # fmt: skip
        for whole, part in self._pairs():
            if moments := self.state.pop(whole, None):
                self.engine.base_optimizer.state[part] = {
                    name: share(value, ranks=ranks, rank=rank).to(part.device).clone()
                    if value.ndim
                    else value.cpu()
                    for name, value in moments.items()
                }

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.engine is None else self.engine.step(closure)

    def collect(self) -> None:
        """Bring the moments of whole weights to the host. All processes together."""
        for whole, part in self._pairs():
            self.state[whole] = {
                name: self.gather(value)[: len(whole)].cpu() if value.ndim else value.cpu()
                for name, value in self.engine.base_optimizer.state[part].items()
            }

    def release(self) -> None:
        self.state.clear()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight, and this process's share of it."""
        shares = self.engine.base_optimizer.param_groups
        for wholes, parts in zip(self.param_groups, shares, strict=True):
            yield from zip(wholes["params"], parts["params"], strict=True)
