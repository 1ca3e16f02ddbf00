"""Every drafting method, by name. A new file in this folder is a new method."""

import importlib
import pkgutil

from models.drafts.base import DraftConf

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

METHODS: dict[str, type[DraftConf]] = {conf.method: conf for conf in DraftConf.__subclasses__()}
