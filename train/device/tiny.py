"""A small target with random weights, so that every graph compiles in seconds."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.device.device import Device
from models.targets.loading import freeze_model
from models.targets.target import Target

VOCAB = 512
NUM_LAYERS = 4
SHARPNESS = 12.0  # of the next token's distribution, so that a draft of some of the layers agrees at times


def build_tiny_target(device: Device, **shapes: int) -> Target:
    """Return the target on the device; its weights are the same on every device."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        }
        | shapes
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS * config.initializer_range)
    target = freeze_model(model.to(device.dtype), None, name="tiny", device=device)
    model.to(device.torch_device)
    return target
