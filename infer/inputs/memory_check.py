"""Ask before a target is loaded whether the device holds it, with its drafts and caches.

The sum is a lower bound: weights, caches and the passes over prompts are counted, what measurements
keep beside them is not.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from conf.entry import CONF_DIR, read_config
from infer.engine.decode import Decoder
from models.checkpoints.checkpoint_files import read_config as read_checkpoint_config
from models.device.config import MachineConf
from models.device.cpu import can_pack, count_packed_bytes, is_large
from models.device.device import Device
from models.device.machine_specs import read_process_bytes
from models.device.memory_trace import fake_model
from models.drafts.eagle import EMBEDDINGS
from models.drafts.medusa2 import TARGET_FOLDER_KEY
from models.io.errors import UserError
from models.meta_model import build_meta_target, shard_target
from models.targets.config import CheckpointSource, TargetConf
from models.targets.pretrained import read_planning_config
from models.targets.stored_weights import read_shapes, stays_quantized
from models.trees.sampling_config import SamplingConf

GIB = 2**30
QUANTIZED_LINE = "memory: quantized weights take less than is planned for, so whether they fit is not checked"
log = logging.getLogger(__name__)
MEMORY_MARGIN = 0.1  # share of the memory that is kept for compiler, runtime and measurements


@dataclass(frozen=True, kw_only=True)
class DecodingSize:
    """The most rows and tokens that a command decodes together."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    set_batch: Callable[[int], str]  # an override, for example `batch=4`


def check_memory(
    target: TargetConf,
    directories: list[Path],
    size: DecodingSize,
    device: Device,
    memory_gib: float | None,
    *,
    tensor: int = 1,
) -> None:
    """Raise UserError, with an override that fits if there is one, for what a device of known memory cannot hold.

    The target is split over `tensor` of them.
    """
    core_bytes = find_core_bytes(memory_gib, device)
    if core_bytes is None:
        return
    packs = device.packs_weights and can_pack(device.dtype)
    draft_bytes = count_draft_bytes(directories, device.dtype, packs=packs)
    limit = (1 - MEMORY_MARGIN) * core_bytes

    def count_bytes(batch: int) -> int:
        return draft_bytes + trace_decoding(target, device, size, batch, tensor=tensor)

    needed = count_bytes(size.batch)
    if needed <= limit:
        return
    if stays_quantized(read_planning_config(target)):
        log.info(QUANTIZED_LINE)
        return
    halves = [size.batch >> n for n in range(1, size.batch.bit_length())]
    fitting = next((batch for batch in halves if count_bytes(batch) <= limit), None)
    remedy = f"with {size.set_batch(fitting)} it fits" if fitting else "take a larger device"
    raise UserError(
        f"{'device' if memory_gib is None else 'device.memory_gib'}: must hold target, drafts and "
        f"{size.batch} rows of {size.prompt_tokens + size.new_tokens} tokens, which take at least "
        f"{needed / GIB:.2f} GiB, got {limit / GIB:.2f} usable of {core_bytes / GIB:.2f}; {remedy}"
    )


def find_core_bytes(memory_gib: float | None, device: Device) -> float | None:
    """Return the bytes that a process may take: those configured, or those of its device.

    None if neither the device nor a published figure of its instance type tells.
    """
    if memory_gib is not None:
        return memory_gib * GIB
    if (size := read_process_bytes(device)) is not None:
        return size
    file = Path(CONF_DIR) / "machine" / f"{device.instance_type}.yaml"
    return read_config(file, MachineConf).core_bytes if file.exists() else None


def count_draft_bytes(directories: list[Path], dtype: torch.dtype, *, packs: bool = False) -> int:
    """Return the bytes of the checkpoints' weights in this type, of an adapted target too, without EAGLE's embeddings.

    These are the target's own, unless the draft has trained others. `packs` counts packed copies too.
    """
    adapted = [d / name for d in directories if (name := read_checkpoint_config(d).get(TARGET_FOLDER_KEY))]
    shapes = [read_shapes(CheckpointSource(path=str(folder))) for folder in [*directories, *adapted]]
    stored = [item for tensors in shapes for item in tensors.items() if item[0] != EMBEDDINGS]
    if packs:
        stored += [(name, t) for name, t in stored if t.dim() == 2 and is_large(t) and "embed" not in name]
    return sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for _, t in stored)


@torch.no_grad()
def trace_decoding(conf: TargetConf, device: Device, size: DecodingSize, batch: int, *, tensor: int = 1) -> int:
    """Return the peak bytes of one of `tensor` parts of the target when it reads `batch` prompts and writes a token."""
    target, slots = build_meta_target(conf, device.dtype), size.prompt_tokens + size.new_tokens
    if tensor > 1:
        shard_target(target, tensor, is_native=True)
    with fake_model([target.model], vocab=[target.vocab_size], scores_in_memory=device.scores_in_memory) as tracer:
        tracer.label_tensors("target", [*target.model.parameters(), *target.model.buffers()])
        with tracer.trace_phase("prompts") as phase:
            decoder = Decoder(target, sampling=SamplingConf(), slots=slots, batch=batch)
            prompts = [[0] * size.prompt_tokens] * batch
            decoder.decode(prompts, row_ids=range(batch), max_new_tokens=1)
    packs = device.packs_weights and tensor == 1  # weights that are split are not packed
    packed_bytes = count_packed_bytes(target.model) if packs else 0
    return phase.peak_bytes.total() + packed_bytes
