"""Metrics of training steps, kept on the device and read in one transfer per log line."""

import torch
from jaxtyping import Float
from torch import Tensor

from train.distributed.parallel import Parallel


class MetricBuffer:
    """Sums and counts of up to `steps` steps, in one tensor with a line for each step."""

    def __init__(self, *, steps: int):
        self.steps, self.num_lines = steps, 0
        self.names: list[str] = []
        self.lines: Float[Tensor, "steps names 2"] | None = None

    def add(self, sums: dict[str, Float[Tensor, " 2"]]) -> None:
        """Append the (sum, count) of each metric of a step, always in the same order."""
        line = torch.stack([pair.detach().float() for pair in sums.values()])
        if self.lines is None:
            self.names = list(sums)
            # Allocated on the host: on the device, only the first step's graph would contain it.
            self.lines = torch.zeros(self.steps, *line.shape).to(line.device)
        self.lines.index_copy_(0, torch.tensor([self.num_lines]).to(line.device), line[None])
        self.num_lines += 1

    def read(self, parallel: Parallel) -> dict[str, list[tuple[float, float]]]:
        """Return what each step since the last call has added, summed over all processes."""
        assert self.lines is not None
        num_steps, self.num_lines = self.num_lines, 0
        steps = parallel.all_reduce_sum(self.lines).tolist()[:num_steps]
        return {name: [tuple(step[i]) for step in steps] for i, name in enumerate(self.names)}
