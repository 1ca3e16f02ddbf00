"""Every drafting method, by name. A new file in this folder is a new method."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from models.checkpoint import read_config
from models.drafts.base import Draft, DraftConf
from models.errors import UserError
from models.target.target import Target

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def _methods(conf: type[DraftConf]) -> Iterator[type[DraftConf]]:
    """Every class below `conf` that names a method."""
    for below in conf.__subclasses__():
        if "method" in vars(below):
            yield below
        yield from _methods(below)


METHODS = {conf.method: conf for conf in _methods(DraftConf)}


def load_draft(directory: Path, target: Target) -> tuple[DraftConf, Draft]:
    """Read a checkpoint of any method. Raises UserError where it does not fit the target."""
    config = read_config(directory)
    if reading := [conf for conf in METHODS.values() if conf.reads(config)]:
        return reading[-1].load(directory, target)  # where one is a case of another: that one
    known = ", ".join(conf.architecture for conf in METHODS.values())
    names = config.get("architectures", [])
    raise UserError(f"checkpoint: architecture must be one of {known}, got {names} in {directory}")
