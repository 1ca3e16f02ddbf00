"""The `device` and `machine` groups of the configuration."""

import math
from dataclasses import dataclass, field
from enum import Enum

from models.device.neuron_env import NeuronEnv
from models.io.errors import POSITIVE, at_least, check_values, require

LOCAL_MACHINE = "here"


class DeviceName(Enum):
    """The devices by name; `auto` takes the accelerator that PyTorch sees, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"
    xla = "xla"


class Precision(Enum):
    """Number types of target and runtime, or of Muon's products; drafts have fp32 masters."""

    # bfloat16; on a CPU float32, unless it has instructions for bfloat16 and the target is large
    # (models/targets/precision.py).
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True)
class DeviceConf(NeuronEnv):
    """Device, precision, compilation, and the environment of Neuron's compiler and runtime."""

    name: DeviceName = DeviceName.auto
    precision: Precision = Precision.auto
    compile: bool = True
    cuda_graphs: bool = False  # whether rounds of decoding are replayed as CUDA graphs
    memory_gib: float | None = None  # that a process may take; None: what the device has
    threads: int | None = None  # of the CPU; None: PyTorch's choice, or one for a tiny target

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "device", threads=at_least(1, "null leaves it to PyTorch"), memory_gib=POSITIVE)
        require(
            not self.stochastic_rounding or self.precision is not Precision.float32,
            "device.stochastic_rounding: rounds to bfloat16, got device.precision=float32; leave one of them out",
        )

    @property
    def is_native(self) -> bool:
        """Return whether PyTorch runs by itself, with DDP and FSDP2; PyTorch/XLA shards a draft's moments alone."""
        return self.name is not DeviceName.xla


@dataclass(kw_only=True)
class MachineConf:
    """The published figures of a machine; `here` has none and is measured."""

    name: str = LOCAL_MACHINE
    chips: int = 1
    cores: int = 1  # per chip, as processes see them
    logical_cores: int | None = None  # physical cores in one of them; None: they are not grouped
    memory_gib: float = 0.0  # per chip, as are bandwidth, tflops and link
    bandwidth_gb_s: float = 0.0
    tflops: dict[str, float] = field(default_factory=dict)  # by number type
    link_gb_s: float = 0.0  # to other chips
    length_multiple: int = 1  # of a row, on the machine's route
    # Whether optimizers hold a copy of all weights and attention runs in chunks, unlike on a CPU.
    is_accelerator: bool = True
    scores_in_memory: bool = False  # whether no kernel attends with a mask, so that all scores are in memory
    needs_xla: bool = False  # whether nothing newer than PyTorch/XLA runs there
    repeats_heads: bool = False  # whether more cores than key-value heads may share a target

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("memory_gib", "bandwidth_gb_s", "link_gb_s"), at_least(0))
        check_values(self, "machine", chips=at_least(1), cores=at_least(1), **sizes)
        require(
            all(value > 0 for value in self.tflops.values()),
            f"machine.tflops: must be positive, got {self.tflops}; leave out the types that the machine lacks",
        )

    @property
    def total_cores(self) -> int:
        return self.chips * self.cores

    @property
    def core_bytes(self) -> float:
        """Return the memory of a core in bytes."""
        return self.memory_gib * 2**30 / self.cores

    @property
    def core_bandwidth(self) -> float:
        """Return the bytes that a core reads or writes per second."""
        return self.bandwidth_gb_s * 1e9 / self.cores

    @property
    def core_link_bandwidth(self) -> float:
        """Return the bytes that a core sends to other chips per second; inf without a link."""
        return self.link_gb_s * 1e9 / self.cores or math.inf
