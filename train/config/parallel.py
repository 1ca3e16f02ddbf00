"""The `parallel` group of the configuration."""

from dataclasses import dataclass
from enum import Enum

from models.validation import at_least, check_values


class Weights(Enum):
    """The placement of weights: a full copy on each data rank, or a part."""

    replicated = "replicated"
    sharded = "sharded"


@dataclass(kw_only=True)
class ParallelConf:
    """The placement of target and draft on the processes."""

    tensor: int = 1  # processes that the target's layers are split over
    target: Weights = Weights.replicated  # over the data ranks
    draft: Weights = Weights.replicated  # over all processes

    def __post_init__(self) -> None:
        check_values(self, "parallel", tensor=at_least(1))

    @property
    def splits_target(self) -> bool:
        """Return True if several processes hold one copy of the target."""
        return self.tensor > 1 or self.target is Weights.sharded
