"""What steps measure of themselves: kept on the device, read in one transfer a log line."""

import torch
from jaxtyping import Float
from torch import Tensor

from train.distributed.parallel import Parallel


class Window:
    """Sums and counts of up to `steps` steps, in one tensor that every step writes a line of."""

    def __init__(self, *, steps: int):
        self.steps, self.held = steps, 0
        self.names: list[str] = []
        self.lines: Float[Tensor, "steps names 2"] | None = None

    def add(self, sums: dict[str, Float[Tensor, " 2"]]) -> None:
        """The (sum, count) of everything that a step measures, always in the same order."""
        line = torch.stack([pair.detach().float() for pair in sums.values()])
        if self.lines is None:
            self.names = list(sums)
            # made on the host: on the device it would belong to the graph of the first step alone
            self.lines = torch.zeros(self.steps, *line.shape).to(line.device)
        self.lines.index_copy_(0, torch.tensor([self.held]).to(line.device), line[None])
        self.held += 1

    def read(self, parallel: Parallel) -> dict[str, list[tuple[float, float]]]:
        """What each step since the last reading has added, over all processes."""
        assert self.lines is not None
        held, self.held = self.held, 0
        steps = parallel.total(self.lines).tolist()[:held]
        return {name: [tuple(step[i]) for step in steps] for i, name in enumerate(self.names)}
