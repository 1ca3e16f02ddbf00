"""Every drafting method, by name. A new file in this folder is a new method."""

import importlib
import pkgutil
from pathlib import Path

from models.checkpoint import read_config
from models.drafts.base import Draft, DraftConf
from models.errors import UserError
from models.target import Target

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

METHODS: dict[str, type[DraftConf]] = {conf.method: conf for conf in DraftConf.__subclasses__()}


def load_draft(directory: Path, target: Target) -> tuple[DraftConf, Draft]:
    """Read a checkpoint of any method. Raises UserError where it does not fit the target."""
    names = read_config(directory).get("architectures", [])
    for conf in METHODS.values():
        if conf.architecture in names:
            return conf.load(directory, target)
    known = ", ".join(conf.architecture for conf in METHODS.values())
    raise UserError(f"checkpoint: architecture must be one of {known}, got {names} in {directory}")
