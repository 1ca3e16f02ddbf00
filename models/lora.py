"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), as peft puts them into a model."""

from typing import Any

import torch
from torch import Tensor


def add_adapters(decoder: Any, *, rank: int, alpha: float) -> None:
    """Add adapters, initially zero, to a model's decoder in place, and freeze its other weights."""
    from peft import LoraConfig, inject_adapter_in_model

    options: Any = {"r": rank, "lora_alpha": alpha}
    inject_adapter_in_model(LoraConfig(target_modules="all-linear", **options), decoder)


@torch.no_grad()
def merge_adapters(model: Any) -> dict[str, Tensor]:
    """Return the model's state dict with its adapters merged into its weights.

    The model is not changed: adding and subtracting adapters would round its weights each time.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    deltas = {  # of experts, an adapter is of one of their parameters, and wraps that of another
        f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}": sum(
            layer.get_delta_weight(adapter) for adapter in layer.active_adapters
        )
        for name, layer in layers.items()
    }
    weights = {
        name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    assert deltas.keys() <= weights.keys(), sorted(deltas.keys() - weights.keys())
    return {name: t + deltas[name] if name in deltas else t for name, t in weights.items()}
