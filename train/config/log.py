"""The `log` group of the configuration."""

from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

from models.console import IS_MAIN_PROCESS
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
        """Return the trackers to start with Accelerate."""
        return [] if self.wandb is Wandb.off else ["wandb"]

    def check_wandb(self) -> None:
        """Raise UserError if wandb is missing or, for `online`, not logged in.

        On a terminal wandb asks for the key.
        """
        require(
            self.wandb is Wandb.off or find_spec("wandb") is not None,
            f"log.wandb: needs the wandb package, got {self.wandb.value}; "
            "run `pip install wandb`, or set log.wandb=off",
        )
        if self.wandb is not Wandb.online or not IS_MAIN_PROCESS:
            return
        import wandb  # imported here, because it takes seconds

        try:
            problem = None if wandb.login(verify=False) else "no login"
        except wandb.Error as error:
            problem = str(error).partition("\n")[0].rstrip(".")
        require(
            problem is None,
            f"log.wandb: online needs an API key, got none that works ({problem}); set "
            "WANDB_API_KEY, or take log=wandb-offline or log=console",
        )
