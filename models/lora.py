"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), as peft puts them into a model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.errors import UserError


@dataclass(kw_only=True)
class LoraConf:
    """Of every linear layer but the head. Rank 0 has no adapters."""

    rank: int = 0
    alpha: float = 32.0  # the adapter's output counts alpha / rank

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(
                f"draft.lora.rank: must not be negative, got {self.rank}; 0 trains every weight"
            )
        if self.alpha <= 0:
            raise UserError(f"draft.lora.alpha: must be positive, got {self.alpha}; e.g. 32")

    def adapt(self, model: Any) -> None:
        """Put adapters into `model`. They alone are trained from then on, and begin as nothing."""
        from peft import LoraConfig, inject_adapter_in_model

        given: Any = {"r": self.rank, "lora_alpha": self.alpha}
        inject_adapter_in_model(LoraConfig(target_modules="all-linear", **given), model)


@torch.no_grad()
def merged(model: Any) -> dict[str, Tensor]:
    """The state dict of the model as if its adapters had been added to its weights for good.

    The model stays as it is: adding and taking away again would round its weights each time.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    added = {
        f"{name}.weight": sum(layer.get_delta_weight(each) for each in layer.active_adapters)
        for name, layer in layers.items()
    }
    found = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    return {name: t + added[name] if name in added else t for name, t in found.items()}
