"""The `target` group of the configuration, and where a pretrained model comes from."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

DEMO_TARGET = Path(__file__).parents[2] / "data" / "demo" / "target"


@dataclass(kw_only=True)
class ModelSource:
    """The location of a pretrained model: a hub name, or `path` of a local copy."""

    config_key: ClassVar[str]  # `target` or `draft`

    name: str = ""  # of the hub
    path: str | None = None  # of a local copy
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def location(self) -> str:
        """Return what from_pretrained takes."""
        return self.path or self.name

    @property
    def location_key(self) -> str:
        """Return the configuration key that `location` comes from."""
        return f"{self.config_key}.{'path' if self.path else 'name'}"


@dataclass(kw_only=True)
class CheckpointSource(ModelSource):
    """A language model that a run has saved."""

    config_key: ClassVar[str] = "checkpoint"

    @property
    def location_key(self) -> str:
        return self.config_key


@dataclass(kw_only=True)
class TargetConf(ModelSource):
    """The model whose outputs must not change: a hub name, a local path, or `demo`."""

    config_key: ClassVar[str] = "target"

    name: str = "demo"

    @property
    def location(self) -> str:
        return str(DEMO_TARGET) if self.name == "demo" and self.path is None else super().location

    @property
    def is_demo(self) -> bool:
        """Return whether it is the target that ships in data/demo."""
        return Path(self.location).resolve() == DEMO_TARGET.resolve()
