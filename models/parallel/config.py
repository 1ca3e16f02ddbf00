"""The processes that a target's layers are split over."""

from dataclasses import dataclass

from models.io.errors import at_least, check_values


@dataclass(kw_only=True)
class TensorConf:
    """The `parallel` group of a command that trains nothing."""

    tensor: int = 1  # processes that the target's layers are split over

    def __post_init__(self) -> None:
        check_values(self, "parallel", tensor=at_least(1))
