"""Load the target: its model, checked, frozen and moved to the device, with its tokenizer.

The layers of one that is too large for a device are split over the processes of a tensor group.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from models.checkpoints.checkpoint import find_non_finite
from models.checkpoints.fingerprints import tables_fingerprint, target_fingerprint, tokenizer_fingerprint
from models.checkpoints.tokenizer_files import find_tokenizer_folder
from models.device.device import Device
from models.io.errors import UserError, require
from models.parallel.local_shards import compute_on_local_shards
from models.parallel.processes import connect_processes
from models.parallel.tensor_parallel import has_expert_plan
from models.targets.config import ModelSource, TargetConf
from models.targets.pretrained import load_model, load_tables, load_tokenizer, read_model_config
from models.targets.target import Target

log = logging.getLogger(__name__)


def load_target(conf: TargetConf, device: Device, *, name: str | None = None, model: Any = None) -> Target:
    """Load the model, freeze it and move it to the device; return it with its tokenizer.

    A loaded `model` stays where it is, as it is divided among several devices. Raise UserError for a model that is
    missing or cannot be served exactly.
    """
    loaded = load_model(conf, device.dtype) if model is None else model
    target = freeze_model(loaded, load_tokenizer(conf), name=name or conf.path or conf.name, device=device)
    _record_origin(target, conf)
    if not target.eos_ids and target.tokenizer is not None and target.tokenizer.eos_token:
        log.warning(
            "target: nothing ends its answers but their limit of tokens, since its generation_config.json has no "
            "eos_token_id; add that of the tokenizer's %s, %d",
            target.tokenizer.eos_token,
            target.tokenizer.eos_token_id,
        )
    if model is None:  # after the checks, which a lazy device would compile
        loaded.to(device.torch_device)
    return target


def load_target_tables(conf: TargetConf, device: Device, *, fingerprint: str) -> Target:
    """Load the target without its layers, for a run that reads their outputs from a store and decodes nothing.

    `fingerprint` is that of all weights, which the store tells.
    """
    model, tokenizer = load_tables(conf, device.dtype), load_tokenizer(conf)
    target = _build_target(model, tokenizer, conf.path or conf.name, device, lambda _: fingerprint)
    _record_origin(target, conf)
    model.to(device.torch_device)
    return target


def open_target(conf: TargetConf, device: Device, *, tensor: int) -> Target:
    """Load the target, or connect the `tensor` launched processes and load this one's part of it."""
    if tensor == 1:
        return load_target(conf, device)
    connect_processes(device.torch_device.type)
    return load_split_target(conf, device, tensor=tensor)


def load_split_target(conf: TargetConf, device: Device, *, tensor: int, replicas: int = 1, shards: int = 1) -> Target:
    """Load this process's part of the target, whose layers are split over `tensor` processes; collective.

    There are `replicas` copies of it, or the weights are also sharded over `shards` processes (FSDP2): then it runs
    eagerly, since layers that compute with DTensors break graphs.
    """
    accelerator = torch.accelerator.current_accelerator()
    taken = "cpu" if accelerator is None else accelerator.type  # by transformers, whatever device is configured
    require(
        device.torch_device.type == taken,
        f"device.name: must be {taken} for a split target, which loads there, got {device.name}; hide the accelerator "
        "or use it",
    )
    from torch._inductor import config as inductor  # deferred: slow to import

    inductor.deterministic = True  # processes choose kernels by what they time, and must propose the same tokens

    model = _load_part(conf, device.dtype, tensor=tensor, replicas=replicas, shards=shards)
    if shards == 1:
        compute_on_local_shards(model)
    target = load_target(conf, device, model=model)
    target.processes, target.gathers_weights = tensor * shards, shards > 1
    target.head.joins_ranks = True
    return target.eager() if target.gathers_weights else target


def _load_part(source: ModelSource, dtype: torch.dtype, *, tensor: int, replicas: int, shards: int) -> Any:
    """Load the model with only this process's part of the weights."""
    from transformers.distributed.configuration_utils import DistributedConfig

    class MeshConfig(DistributedConfig):
        @property
        def dp_size(self) -> int:
            """Return 1 without sharding, or transformers would wrap replicas in FSDP."""
            return super().dp_size if shards > 1 else 1

    has_experts = has_expert_plan(read_model_config(source))
    mesh_config = MeshConfig(
        tp_size=tensor,
        fsdp_size=shards,
        dp_replicate_size=replicas,
        ep_size=tensor if has_experts and shards == 1 else 1,
    )
    model = load_model(source, dtype, distributed_config=mesh_config)
    del model.config.distributed_config  # else drafts that copy the config would be split, too
    # Elsewhere each process has all heads: a plan gathers them, or leaves attention whole.
    splits_heads = any(name.endswith(".k_proj") and style == "colwise" for name, style in model.tp_plan.items())
    model.key_value_heads = model.config.get_text_config().num_key_value_heads // (tensor if splits_heads else 1)
    return model


def freeze_model(model: Any, tokenizer: Any, *, name: str, device: Device) -> Target:
    """Return a loaded model as a frozen target; raise UserError if it cannot be served exactly."""
    target = _build_target(model, tokenizer, name, device, target_fingerprint)
    check_logits(target)
    return target


def _build_target(model: Any, tokenizer: Any, name: str, device: Device, hash_model: Callable[[Any], str]) -> Target:
    target = Target(model, tokenizer, name=name, device=device, hash_model=hash_model)
    target.tables_fingerprint = tables_fingerprint(model)
    if tokenizer is not None:
        target.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
    return target


def _record_origin(target: Target, conf: TargetConf) -> None:
    target.revision = conf.revision
    target.tokenizer_folder = find_tokenizer_folder(conf.location, conf.revision)


@torch.no_grad()
def check_logits(target: Target) -> None:
    """Reject models whose logits are not finite, or scaled or capped, as `LanguageModel.logits` does neither."""
    # Two tokens are enough to compare, and every vocabulary has the ids 0 and 1.
    input_ids = torch.arange(2, device=target.head.weight.device)[None]
    expected = target.model(input_ids=input_ids).logits
    if not expected.isfinite().all():
        weight = find_non_finite(target.model)
        raise UserError(
            f"target.name: the model's logits must be finite, got {target.name!r}, "
            + (
                f"whose weight {weight} is not; give intact weights"
                if weight
                else f"which overflows in {expected.dtype}; set device.precision=float32"
            )
        )
    logits = target.logits(target.decoder(input_ids=input_ids).last_hidden_state)
    require(
        # Both passes compute the same in the same precision; bfloat16 rounds by 0.4 % at most.
        torch.allclose(expected.float(), logits.float(), atol=1e-3, rtol=1e-2),
        "target.name: the model must not scale or cap its logits after the LM head, got "
        f"{target.name!r} ({type(target.model).__name__}); choose another target",
    )
