"""The `log` group of a training's configuration."""

from dataclasses import dataclass

from models.tracking import TrackerConf, Wandb
from models.validation import at_least, check_values


@dataclass(kw_only=True)
class LogConf(TrackerConf):
    """Configuration of a run's metrics: how often they are written, and where."""

    interval: int = 10  # steps

    def __post_init__(self) -> None:
        check_values(self, "log", interval=at_least(1))

    def list_trackers(self) -> list[str]:
        """Return the trackers to start with Accelerate."""
        return [] if self.wandb is Wandb.off else ["wandb"]
