"""Models without weights: what a config alone says, before anything is loaded."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.device import Device
from models.distill.losses import LossConf
from models.drafts.base import Draft, DraftConf
from models.parallel import tensor_parallel
from models.parallel.tensor_parallel import Layers, Part
from models.target.language_model import Transformer
from models.target.target import Target, TargetConf


class Outline(Target):
    """A target of which shapes alone are known. It computes inside `tally.imagined`."""

    def __init__(self, model: Any, *, name: str, device: Device):
        Transformer.__init__(self, model.eval().requires_grad_(False), device=device)
        self.tokenizer, self.name = None, name
        self.parameters = sum(p.numel() for p in model.parameters())
        self.fingerprint = self.tokenizer_fingerprint = "of no weights"

    def with_weights(self, lm: Transformer, *, name: str) -> "Outline":
        other = copy.copy(self)
        vars(other).update(vars(lm) | {"device": self.device, "name": name})
        return other


def outline(conf: TargetConf, dtype: torch.dtype) -> Outline:
    """The target as its config.json describes it, on `meta`."""
    place = Device(name="cpu", torch_device=torch.device("cpu"), dtype=dtype, compiles=False)
    return Outline(conf.source.outline(dtype), name=conf.path or conf.name, device=place)


def outlined(conf: DraftConf, target: Outline, *, loss: LossConf, seed: int) -> Draft:
    """The draft that a run would begin with, on `meta`."""
    with torch.device("meta"):
        return conf.build(target, loss=loss, seed=seed)


def models_of(draft: Draft) -> list[nn.Module]:
    """The draft, and models that it computes with and that are not its submodules."""
    inside = [value.model for value in vars(draft).values() if isinstance(value, Transformer)]
    return [draft, *inside]


def share(target: Outline, ranks: int, *, whole: Collection[str] = ()) -> None:
    """Leave what one of `ranks` tensor-parallel processes holds. After drafts are built.

    Layers named `whole` stay so. Raises UserError where the heads cannot be shared so.
    """
    alone = _Share(ranks=ranks, rank=0, column=nn.Linear, row=nn.Linear, embedding=nn.Embedding)
    tensor_parallel.parallelise(target.model, alone, whole=whole)
    target.kv_heads = tensor_parallel.key_value_heads(target.model)


def head_names(target: Target) -> list[str]:
    """The output head, and embeddings that are tied to it: drafts learn from all of its logits."""
    modules = target.model.named_modules()
    return [name for name, part in modules if getattr(part, "weight", None) is target.head.weight]


@dataclass(frozen=True, kw_only=True)
class _Share(Layers):
    """Cuts layers where they are. What other ranks would send has the shape of its own part."""

    def like(self, layer: Any, part: Part) -> nn.Module:
        shape, axis = list(layer.weight.shape), part.style.axis
        shape[axis] = shape[axis] * part.repeats // self.ranks
        layer.weight = nn.Parameter(layer.weight.new_empty(shape), requires_grad=False)
        gathers = part.style.whole and axis == (0 if isinstance(layer, nn.Linear) else 1)
        if gathers:
            layer.register_forward_hook(lambda _, __, out: torch.cat([out] * self.ranks, -1))
        elif part.style.whole and isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: (args[0].chunk(self.ranks, -1)[0],))
        return layer
