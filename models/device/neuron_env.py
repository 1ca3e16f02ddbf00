"""What a run tells compiler and runtime through the environment, and what it records of it.

Set before the device is first used, as runtime and compiler read it then. What the environment says
already stays; where it contradicts the config the run is refused, as one of the two is a mistake.
"""

import os
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from models.device.host import Machine
from models.errors import UserError

FLAGS = "NEURON_CC_FLAGS"
GROUPING = "NEURON_LOGICAL_NC_CONFIG"
ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
VISIBLE = "NEURON_RT_VISIBLE_CORES"
COUNT = "NEURON_RT_NUM_CORES"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
XLA_CACHE = "NEURON_COMPILE_CACHE_URL"
NATIVE_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"  # written by renaming, so that hosts may share it
CACHE = {"neuron": NATIVE_CACHE, "xla": XLA_CACHE}
OWN_XLA_CACHE = "/var/tmp/neuron-compile-cache"  # where the XLA route keeps graphs by itself
CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(kw_only=True)
class Settings:
    """The fields of `device` that become environment variables; null leaves each as it is."""

    cache_dir: str | None = None  # of compiled graphs
    stochastic_rounding: bool = False  # of bfloat16; a run can then not be repeated bit by bit
    logical_cores: int | None = None  # physical cores in a logical one (LNC); the hardware's own: 2
    visible_cores: str | None = None  # such as 0-3 or 0,2: this process takes them and no others
    num_cores: int | None = None  # how many this process takes, whichever are free

    def __post_init__(self) -> None:
        if self.logical_cores not in (None, 1, 2):
            raise UserError(
                f"device.logical_cores: must be 1 or 2, got {self.logical_cores}; "
                "null leaves it to the hardware"
            )
        if self.visible_cores is not None and not CORES.fullmatch(self.visible_cores):
            raise UserError(
                f"device.visible_cores: must be core numbers such as 0-3 or 0,2, got "
                f"{self.visible_cores}; device.num_cores says how many"
            )
        if self.num_cores is not None and self.num_cores < 1:
            raise UserError(f"device.num_cores: must be at least 1, got {self.num_cores}")
        if self.visible_cores is not None and self.num_cores is not None:
            raise UserError(
                f"device.num_cores: must be null beside device.visible_cores={self.visible_cores}, "
                f"which would win, got {self.num_cores}"
            )

    def apply(self, route: str, *, drives_neuron: bool, machine: Machine) -> dict[str, str]:
        """Set the environment. Returns what it says now of everything that matters to the route."""
        if not drives_neuron:
            self._refuse_what_only_neuron_has(route)
        if route not in CACHE:
            return self._inductor()
        wanted = {CACHE[route]: ("cache_dir", self.cache_dir)}
        if drives_neuron:
            wanted |= {
                ROUNDING: ("stochastic_rounding", str(int(self.stochastic_rounding))),
                GROUPING: ("logical_cores", self.logical_cores),
                VISIBLE: ("visible_cores", self.visible_cores),
                COUNT: ("num_cores", self.num_cores),
            }
        for name, (key, value) in wanted.items():
            if value is not None:
                _put(name, str(value), key)
        if drives_neuron:
            self._set_flags(route)
            _refuse_two_groupings()
        if route == "xla":
            _refuse_shared_cache(machine)
        return {name: os.environ[name] for name in (*wanted, FLAGS) if name in os.environ}

    def _inductor(self) -> dict[str, str]:
        """PyTorch's own compiler, which fills in the variable itself where nobody did."""
        found = {} if self.cache_dir is None else {INDUCTOR_CACHE: self.cache_dir}
        os.environ.update(found)
        return found

    def _refuse_what_only_neuron_has(self, route: str) -> None:
        for key in ("stochastic_rounding", "logical_cores", "visible_cores", "num_cores"):
            if (value := getattr(self, key)) not in (None, False):
                raise UserError(
                    f"device.{key}: is a setting of Neuron cores, got {value} with the device "
                    f"{route}; leave it out"
                )

    def _set_flags(self, route: str) -> None:
        """Compiler flags: the grouping of cores, and fp32 that stays fp32.

        By itself the XLA route's compiler multiplies fp32 matrices in bfloat16.
        """
        wanted = {}
        if self.logical_cores is not None:
            wanted["--logical-nc-config"] = str(self.logical_cores)
        if route == "xla":
            wanted["--auto-cast"] = "none"
        missing = [f"{flag}={value}" for flag, value in wanted.items() if _flag(flag) is None]
        if missing:
            os.environ[FLAGS] = " ".join([*os.environ.get(FLAGS, "").split(), *missing])


def _put(name: str, value: str, key: str) -> None:
    before = os.environ.get(name)
    if before not in (None, value):
        raise UserError(
            f"device.{key}: must agree with the environment, which has {name}={before}, got "
            f"{value}; unset {name} or change device.{key}"
        )
    os.environ[name] = value


def _flag(name: str) -> str | None:
    """Value of a compiler flag, written `--flag=value` or `--flag value`."""
    same = {name, "-lnc", "--lnc"} if name == "--logical-nc-config" else {name}
    words = shlex.split(os.environ.get(FLAGS, "").replace("=", " "))
    for word, value in pairwise(words):
        if word in same:
            return value
    return None


def _refuse_two_groupings() -> None:
    """Runtime and compiler must group physical cores alike; both take 2 where nothing is said."""
    runtime, compiler = os.environ.get(GROUPING), _flag("--logical-nc-config")
    if (runtime or "2") != (compiler or "2"):
        raise UserError(
            f"device.logical_cores: runtime and compiler must agree, got {GROUPING}={runtime} and "
            f"--logical-nc-config={compiler} in {FLAGS}; unset both and set device.logical_cores"
        )


def _refuse_shared_cache(machine: Machine) -> None:
    where = _flag("--cache_dir") or os.environ.get(XLA_CACHE, OWN_XLA_CACHE)
    kind = None if "://" in where else machine.shared(Path(where))
    if kind:
        raise UserError(
            f"device.cache_dir: the XLA route's cache must be this host's own or on S3, as hosts "
            f"that share a folder corrupt it, got {where} on {kind}; use {OWN_XLA_CACHE} or s3://"
        )
