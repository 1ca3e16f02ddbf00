"""Environment variables of Neuron's compiler and runtime: set from the config, and recorded.

They are set before the device is first used, when runtime and compiler read them. Variables that
are already set stay. One that contradicts the config is an error, as one of the two is a mistake.
"""

import os
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

from models.device.host import Host
from models.device.packages import is_native
from models.device.xla.requirements import CACHE_VARIABLE, check_cache_location
from models.io.errors import Rule, at_least, check_values, require

CC_FLAGS = "NEURON_CC_FLAGS"
LOGICAL_CORES = "NEURON_LOGICAL_NC_CONFIG"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_FOLDERS = {  # of each route: its variables, and their folders below `device.cache_dir`
    # Written by renaming, so that hosts may share them. Locks are a host's own, in /tmp/local_cache.
    "neuron": {"TORCH_NEURONX_NEFF_CACHE_DIR": "", "TORCH_NEURONX_HLO_CACHE_DIR": "/hlo"},
    "xla": {CACHE_VARIABLE: ""},
}
# One process of a host compiles a graph while the others wait for its lock: 20 minutes by default, and a large
# graph takes longer.
LOCK_TIMEOUT = "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"
LOCK_SECONDS = "14400"
NEURON_VARIABLES = {
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "stochastic_rounding",
    LOGICAL_CORES: "logical_cores",
    "NEURON_RT_VISIBLE_CORES": "visible_cores",
    "NEURON_RT_NUM_CORES": "num_cores",
}
CORE_GROUPS = Rule("must be 1 or 2", lambda cores: cores in (1, 2), "null leaves it to the hardware")
CORE_NUMBERS = Rule(
    "must be core numbers such as 0-3 or 0,2",
    lambda cores: re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores) is not None,
    "device.num_cores sets only their number",
)


@dataclass(kw_only=True)
class NeuronEnv:
    """The fields of `device` that become environment variables; null leaves each as it is."""

    cache_dir: str | None = None  # of compiled graphs
    stochastic_rounding: bool = False  # to bfloat16; runs are then not bitwise repeatable
    logical_cores: int | None = None  # physical cores in a logical one (LNC); 2 by default
    visible_cores: str | None = None  # such as 0-3 or 0,2: the only cores of this process
    num_cores: int | None = None  # how many free cores this process takes

    def __post_init__(self) -> None:
        check_values(self, "device", logical_cores=CORE_GROUPS, visible_cores=CORE_NUMBERS, num_cores=at_least(1))
        require(
            self.visible_cores is None or self.num_cores is None,
            f"device.num_cores: must be null beside device.visible_cores={self.visible_cores}, "
            f"which would win, got {self.num_cores}",
        )

    def export_variables(self) -> None:
        """Set the native route's variables where its package is installed; `set_environment` checks them.

        Call this before torch is imported: the package reads some of them then, and others when the device is first
        looked for, whose count of cores it keeps.
        """
        if is_native():
            variables = {**self._list_cache_folders("neuron"), LOCK_TIMEOUT: LOCK_SECONDS, **self._list_variables()}
            for name, value in variables.items():
                os.environ.setdefault(name, value)

    def _list_variables(self) -> dict[str, str]:
        """Return the values of the variables of Neuron's runtime that are configured."""
        values = {name: getattr(self, key) for name, key in NEURON_VARIABLES.items()}
        return {n: str(int(v) if isinstance(v, bool) else v) for n, v in values.items() if v is not None}

    def _list_cache_folders(self, route: str) -> dict[str, str]:
        """Return the values of a route's cache variables; none without `device.cache_dir`."""
        if self.cache_dir is None:
            return {}
        return {name: f"{self.cache_dir}{folder}" for name, folder in CACHE_FOLDERS[route].items()}

    def set_environment(self, route: str, *, on_neuron: bool, host: Host) -> dict[str, str]:
        """Set the environment; return the resulting values of all variables of the route.

        Raise UserError for a setting that the route lacks or that contradicts the environment.
        """
        for key in () if on_neuron else NEURON_VARIABLES.values():
            require(
                getattr(self, key) in (None, False),
                f"device.{key}: is a setting of Neuron cores, got {getattr(self, key)} with the "
                f"device {route}; leave it out",
            )
        require(
            self.logical_cores is None or not (host.instance_type or "").startswith(("trn1", "inf2")),
            f"device.logical_cores: must be null on {host.instance_type}, whose cores are not grouped, got "
            f"{self.logical_cores}; leave it out",
        )
        for key in ("visible_cores", "num_cores") if route == "neuron" else ():
            require(
                getattr(self, key) is None or int(os.environ.get("WORLD_SIZE", "1")) == 1,
                f"device.{key}: must be null in a run of several processes, whose backend takes a core for "
                f"each, got {getattr(self, key)}; leave it out",
            )
        if route not in CACHE_FOLDERS:  # Inductor's cache has a default
            variables = {} if self.cache_dir is None else {INDUCTOR_CACHE: self.cache_dir}
            os.environ.update(variables)
            return variables
        for name, value in self._list_cache_folders(route).items():
            _set_variable("cache_dir", name, value)
        for name, value in self._list_variables().items() if on_neuron else ():
            _set_variable(NEURON_VARIABLES[name], name, value)
        if route == "neuron":
            os.environ.setdefault(LOCK_TIMEOUT, LOCK_SECONDS)
        if on_neuron:
            self._set_compiler_flags(route)
        if route == "xla":
            check_cache_location(_read_flag("--cache_dir"), host)
        names = (*CACHE_FOLDERS[route], LOCK_TIMEOUT, *(NEURON_VARIABLES if on_neuron else ()), CC_FLAGS)
        return {name: os.environ[name] for name in names if name in os.environ}

    def _set_compiler_flags(self, route: str) -> None:
        """Set compiler flags for the grouping of cores and for fp32 products.

        By default the XLA route's compiler multiplies fp32 matrices in bfloat16. Runtime and
        compiler must group physical cores alike; both default to 2.
        """
        flags = {"--logical-nc-config": self.logical_cores, "--auto-cast": "none" if route == "xla" else None}
        missing = [f"{flag}={value}" for flag, value in flags.items() if value is not None and _read_flag(flag) is None]
        if missing:
            os.environ[CC_FLAGS] = " ".join([*os.environ.get(CC_FLAGS, "").split(), *missing])
        runtime, compiler = os.environ.get(LOGICAL_CORES), _read_flag("--logical-nc-config")
        require(
            (runtime or "2") == (compiler or "2"),
            "device.logical_cores: runtime and compiler must agree, got "
            f"{LOGICAL_CORES}={runtime} and --logical-nc-config={compiler} in {CC_FLAGS}; "
            "unset both and set device.logical_cores",
        )


def _set_variable(key: str, name: str, value: str) -> None:
    """Set a variable to the value of a key; raise UserError if the environment has another one."""
    before = os.environ.setdefault(name, value)
    require(
        before == value,
        f"device.{key}: must agree with the environment, which has {name}={before}, "
        f"got {value}; unset {name} or change device.{key}",
    )


def _read_flag(name: str) -> str | None:
    """Return the value of a compiler flag, written `--flag=value` or `--flag value`, or None."""
    aliases = {name, "-lnc", "--lnc"} if name == "--logical-nc-config" else {name}
    words = shlex.split(os.environ.get(CC_FLAGS, "").replace("=", " "))
    return next((value for word, value in pairwise(words) if word in aliases), None)
