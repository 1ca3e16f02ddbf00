"""Models without weights, built from their configs to plan a run before anything is loaded."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.device.device import Device
from models.device.memory_trace import trace_once
from models.drafts.base import Draft
from models.drafts.options import DraftConf
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.parallel import tensor_parallel
from models.parallel.tensor_parallel import EXPERTS_SHARD, INPUT_AXIS, LayerShard, ParallelLayers
from models.targets.config import TargetConf
from models.targets.language_model import LanguageModel
from models.targets.modeling import HookedDecoder
from models.targets.pretrained import build_planning_model
from models.targets.target import Target


class MetaTarget(Target):
    """A target with shapes but no weights. It computes inside `memory_trace.fake_model`."""

    def __init__(self, model: Any, *, name: str, device: Device):
        super().__init__(model, None, name=name, device=device, hash_model=lambda _: "of no weights")
        self._run_layers = HookedDecoder(model, trace_once)  # a pass of 64 equal layers takes the time of a few


def build_meta_target(conf: TargetConf, dtype: torch.dtype) -> MetaTarget:
    """Build the target that its config.json describes, on `meta`."""
    device = Device(name="cpu", torch_device=torch.device("cpu"), dtype=dtype, compiles=False)
    return MetaTarget(build_planning_model(conf, dtype), name=conf.path or conf.name, device=device)


def build_meta_draft(conf: DraftConf, target: MetaTarget, *, loss: LossConf | None = None, seed: int = 0) -> Draft:
    """Build the draft that a run would start with, on `meta`."""
    with torch.device("meta"):
        draft = build_draft(conf, target, loss=loss or LossConf(), seed=seed)
    for lm in _list_language_models(draft):
        if not isinstance(lm, MetaTarget):
            lm._run_layers = HookedDecoder(lm.model, trace_once)
    return draft


def collect_models(draft: Draft) -> list[nn.Module]:
    """Collect the draft and the models that it computes with but that are not its submodules."""
    return [draft, *(lm.model for lm in _list_language_models(draft))]


def _list_language_models(draft: Draft) -> list[LanguageModel]:
    return [value for value in vars(draft).values() if isinstance(value, LanguageModel)]


def shard_target(target: MetaTarget, ranks: int, *, replicated: Collection[str] = (), is_native: bool = False) -> None:
    """Cut a target down to what one of `ranks` tensor-parallel processes holds.

    The target is changed in place, so call it after drafts are built. Layers named in `replicated`
    stay whole. Raise UserError if the heads cannot be divided among the ranks.
    """
    layers = _MetaLayers(ranks=ranks, rank=0, column=nn.Linear, row=nn.Linear, embedding=nn.Embedding)
    tensor_parallel.parallelize_model(target.model, layers, replicated=replicated, is_native=is_native)


@dataclass(frozen=True, kw_only=True)
class _MetaLayers(ParallelLayers):
    """Parallel layers on `meta`, cut in place; copies of a rank's own part stand in for those of other ranks."""

    def build_sharded(self, layer: Any, shard: LayerShard) -> nn.Module:
        """Cut the layer's parameters in place, and give inputs and outputs their sizes by hooks."""
        for name, full in layer.named_parameters():
            share = shard.shard(name, full, ranks=self.ranks, rank=self.rank)
            setattr(layer, name, nn.Parameter(share, requires_grad=False))
        if shard.style is EXPERTS_SHARD:
            layer.num_experts //= self.ranks
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # of a gradient alone, and perhaps past this rank's rows
        if not shard.style.full_features:
            return layer
        if isinstance(layer, nn.Linear) and shard.style.axis == INPUT_AXIS:
            layer.register_forward_pre_hook(lambda _, args: (args[0].chunk(self.ranks, -1)[0],))
        elif isinstance(layer, nn.Linear):
            vars(layer)["forward"] = partial(_gather_linear, layer, self.ranks)
        elif shard.style.axis == 1:
            layer.register_forward_hook(lambda _, __, out: torch.cat([out] * self.ranks, -1))
        return layer


def _gather_linear(layer: nn.Linear, ranks: int, features: Tensor) -> Tensor:
    """Return the full outputs of a layer of which each rank has a part, but the whole bias."""
    full = torch.cat([F.linear(features, layer.weight)] * ranks, -1)
    return full if layer.bias is None else full + layer.bias
