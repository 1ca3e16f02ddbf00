"""The drafting methods by name; every file in this folder that defines one is found here."""

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


def _iter_methods(conf: type[DraftConf]) -> Iterator[type[DraftConf]]:
    """Yield all subclasses of `conf` that name a method."""
    for subclass in conf.__subclasses__():
        if "method" in vars(subclass):
            yield subclass
        yield from _iter_methods(subclass)


METHODS = {conf.method: conf for conf in _iter_methods(DraftConf)}


def load_draft(directory: Path, target: Target) -> tuple[DraftConf, Draft]:
    """Return the configuration and the draft of a checkpoint of any method.

    Raise UserError if it does not fit the target.
    """
    config = read_config(directory)
    if matching := [conf for conf in METHODS.values() if conf.matches_config(config)]:
        return matching[-1].load(directory, target)  # the last match is the most specific
    known = ", ".join(conf.architecture for conf in METHODS.values())
    raise UserError(
        f"checkpoint: architecture must be one of {known}, "
        f"got {config.get('architectures', [])} in {directory}"
    )
