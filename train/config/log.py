"""The `log` group of the configuration."""

from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

from models.errors import require
from models.validation import at_least, check_values


class Wandb(Enum):
    """Modes of Weights & Biases; `offline` writes a folder for `wandb sync`."""

    off = "off"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True)
class LogConf:
    """Configuration of a run's metrics: how often they are written, and where."""

    wandb: Wandb = Wandb.off
    project: str = "drafts"
    entity: str | None = None
    interval: int = 10  # steps

    def __post_init__(self) -> None:
        check_values(self, "log", interval=at_least(1))

    def list_trackers(self) -> list[str]:
        """Return the trackers to start with Accelerate; raise UserError if wandb is missing."""
        if self.wandb is Wandb.off:
            return []
        require(
            find_spec("wandb") is not None,
            f"log.wandb: needs the wandb package, got {self.wandb.value}; "
            "run `pip install wandb`, or set log.wandb=off",
        )
        return ["wandb"]
