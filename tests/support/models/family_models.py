"""Build tiny random models of the served families, with windows far shorter than the texts."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from models.device.device import Device
from models.drafts.causal_lm import CausalLMDraft
from models.drafts.options import CausalLMConf
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.models.tiny import CPU, VOCAB, add_noise, tiny_tokenizer

WINDOW = 4  # shorter than trees are deep
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
HEADS = SHAPE | {"head_dim": 32}
EXPERTS = HEADS | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": MIXED}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}

# the six families that the product promises to support
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "mistral": lambda: transformers.MistralConfig(**HEADS, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **HEADS,
        **SLIDING,
        query_pre_attn_scalar=48,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=6, norm_topk_prob=True),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **HEADS, sliding_window=WINDOW, num_local_experts=6, num_experts_per_tok=2, rope_parameters=YARN
    ),
}
# further families, and variants of the six
MORE: dict[str, Callable[[], Any]] = {
    "mistral without a window": lambda: transformers.MistralConfig(**HEADS, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, sliding_window=WINDOW, num_local_experts=4),
    "ministral": lambda: transformers.MinistralConfig(**HEADS, **SLIDING),
    "olmo3": lambda: transformers.Olmo3Config(**SHAPE, **SLIDING),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, **SLIDING, use_sliding_window=True),
    "qwen3 with a window": lambda: transformers.Qwen3Config(**HEADS, **SLIDING, use_sliding_window=True),
    "qwen3_moe with a window": lambda: transformers.Qwen3MoeConfig(
        **EXPERTS, num_experts=4, use_sliding_window=True, sliding_window=WINDOW
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE, sliding_window=WINDOW),
}


def family_model(family: str, *, seed: int = 0) -> Any:
    """Build a random model with sharp logits and with sinks and biases large enough to matter."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config((FAMILIES | MORE)[family]()).eval()
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=numbers)
        model.lm_head.weight.mul_(3.0)
        model.lm_head.weight[0] = 0.0
    model.generation_config.eos_token_id = None  # no text ends early
    return model


def family_target(family: str, *, device: Device = CPU) -> Target:
    return freeze_model(family_model(family), tiny_tokenizer(), name=family, device=device)


def partly_agreeing(family, target, *, noise=0.04):
    """Build a draft model: the target with noise on its weights."""
    model = family_model(family)
    add_noise(model, noise)
    return CausalLMDraft(CausalLMConf(name="noised"), model.requires_grad_(False), target)
