"""The configuration of `python -m train.device`."""

from dataclasses import dataclass, field

from models.device.config import DeviceConf
from models.io.errors import POSITIVE, check_values, require

STAGES = ("place", "product", "operators", "functions", "processes", "sizes", "training")


@dataclass(kw_only=True)
class DeviceCheckConf:
    """Configuration of the checks of a device: which stages run, and how long each of them may take."""

    device: DeviceConf = field(default_factory=DeviceConf)
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    minutes: float = 3.0  # of a stage, after which none of its checks begins
    output_dir: str = "outputs/device"

    def __post_init__(self) -> None:
        check_values(self, minutes=POSITIVE)
        require(bool(self.stages), f"stages: must name some of {', '.join(STAGES)}, got []; leave it out for all")
        for name in self.stages:
            require(name in STAGES, f"stages: must be of {', '.join(STAGES)}, got {name}; choose among them")
