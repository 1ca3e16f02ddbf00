"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), as peft puts them into a model."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.validation import POSITIVE, at_least, check_values


@dataclass(kw_only=True)
class LoraConf:
    """Adapters of every linear layer but the head; rank 0 adds none."""

    rank: int = 0
    alpha: float = 32.0  # the adapter's output is scaled by alpha / rank

    def __post_init__(self) -> None:
        check_values(
            self, "draft.lora", rank=at_least(0, "0 trains every weight"),
            alpha=replace(POSITIVE, remedy="e.g. 32"),
        )  # fmt: skip

    def add_adapters(self, model: Any) -> None:
        """Add adapters, initially zero, to `model` in place, and freeze all its other weights."""
        from peft import LoraConfig, inject_adapter_in_model

        options: Any = {"r": self.rank, "lora_alpha": self.alpha}
        inject_adapter_in_model(LoraConfig(target_modules="all-linear", **options), model)


@torch.no_grad()
def merge_adapters(model: Any) -> dict[str, Tensor]:
    """Return the model's state dict with its adapters merged into its weights.

    The model is not changed: adding and subtracting adapters would round its weights each time.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    deltas = {
        f"{name}.weight": sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
        for name, layer in layers.items()
    }
    weights = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    return {name: t + deltas[name] if name in deltas else t for name, t in weights.items()}
