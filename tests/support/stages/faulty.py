"""A device on which a fault is planted: it acts on compiled functions, and not on those of the CPU beside it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from models.device.device import Device
from tests.support.models.tiny import CPU

Wrap = Callable[[Callable], Callable]


@dataclass(kw_only=True)
class FaultyDevice(Device):
    """A CPU that runs eagerly, whose compiled functions are wrapped."""

    wrap: Wrap

    def compile(self, function, **options):
        return self.wrap(function)


def build_faulty(wrap: Wrap) -> FaultyDevice:
    return FaultyDevice(**vars(CPU), wrap=wrap)


def replace_inside(module: object, name: str, fault: Callable) -> FaultyDevice:
    """Return a device on which `module.name` is the fault, which gets the right function first."""
    right = getattr(module, name)

    def wrap(function):
        def faulty(*args, **kwargs):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, name, lambda *values, **options: fault(right, *values, **options))
                return function(*args, **kwargs)

        return faulty

    return build_faulty(wrap)


def change_result(name: str, change: Callable) -> FaultyDevice:
    """Return a device on which the result of each function of this name is changed."""

    def wrap(function):
        if function.__name__ != name:
            return function
        return lambda *args, **kwargs: change(function(*args, **kwargs))

    return build_faulty(wrap)
