"""The options of the drafting methods by name; every file here that defines a method is found."""

import importlib
import pkgutil
from collections.abc import Iterator

from models.drafts.config.base import DraftConf

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def _iter_methods(conf: type[DraftConf]) -> Iterator[type[DraftConf]]:
    """Yield all subclasses of `conf` that name a method."""
    for subclass in conf.__subclasses__():
        if "method" in vars(subclass):
            yield subclass
        yield from _iter_methods(subclass)


METHODS = {conf.method: conf for conf in _iter_methods(DraftConf)}
