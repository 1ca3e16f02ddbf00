"""Differences between families of language models that matter for serving them exactly."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from models.targets.attention import GROUPED_SDPA, attention_bias

# Families whose sliding windows are served: their decoders take a single mask, so that the window
# applies to all layers or to none, or a mask for each type of layer.
SINGLE_MASK_MODELS = ("mistral", "mixtral", "qwen3_moe", "starcoder2")
MASK_BY_TYPE_MODELS = ("gemma3_text", "gpt_oss", "ministral", "olmo3", "qwen2", "qwen3")
SINK_MODELS = ("gpt_oss",)  # only eager attention adds the sink logit to each softmax
SOFTCAP_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
# What families call the number that keeps a norm from dividing by zero.
EPSILON_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "layernorm_epsilon")
# Under these types a token's rotation depends on the longest row of the batch.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def get_sliding_window(text: Any) -> int | None:
    """Return the window of sliding layers in tokens, the query's included; None if none slides."""
    kinds = getattr(text, "layer_types", None)
    if text.model_type not in SINGLE_MASK_MODELS and kinds and "sliding_attention" not in kinds:
        return None
    return getattr(text, "sliding_window", None)


def get_head_size(text: Any) -> int:
    """Return the width of one attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def get_norm_epsilon(text: Any) -> float:
    """Return the epsilon of the model's norms; 1e-6 for a family that does not state it."""
    stated = (getattr(text, key, None) for key in EPSILON_KEYS)
    return next((value for value in stated if value is not None), 1e-6)


def as_id_list(ids: int | list[int] | None) -> list[int]:
    """Return the ids of a generation config, which holds one, several or none, as a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def choose_attention(config: Any) -> str:
    """Return the name of an attention implementation that takes any mask."""
    return "eager" if config.get_text_config().model_type in SINK_MODELS else GROUPED_SDPA


def dequantize_kwargs(config: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained that dequantize weights stored quantized."""
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method") != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def build_layer_masks(
    config: Any,
    full: Bool[Tensor, "batch 1 seq keys"],
    in_window: Bool[Tensor, "batch 1 seq keys"] | None,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Build the attention masks in the form that the model family takes.

    `full` marks the keys that a query may attend to, `in_window` those in its sliding window (None
    if the model has none).
    """
    text = config.get_text_config()
    # From a mask of bools, PyTorch would make one with -inf in every layer.
    sliding = attention_bias(full if in_window is None else full & in_window, dtype)
    if in_window is not None and text.model_type in MASK_BY_TYPE_MODELS:
        return {"full_attention": attention_bias(full, dtype), "sliding_attention": sliding}
    return sliding


def find_unsupported(config: Any) -> list[str]:
    """List the properties of this model that the runtime cannot serve exactly."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return ["encoder and decoder"]
    if not _has_key_value_heads(text) or hasattr(text, "kv_lora_rank"):
        return ["no plain key-value heads"]
    unsupported = set(getattr(text, "layer_types", None) or [])
    unsupported -= {"full_attention", "sliding_attention"}
    if get_sliding_window(text) and text.model_type not in SINGLE_MASK_MODELS + MASK_BY_TYPE_MODELS:
        unsupported.add(f"a window of {get_sliding_window(text)} tokens")
    unsupported |= {f"{cap} {value}" for cap in SOFTCAP_KEYS if (value := getattr(text, cap, None))}
    if getattr(text, "use_bidirectional_attention", None):
        unsupported.add("attention in both directions")
    rope_types = {rope.get("rope_type", "default") for rope in get_rope_parameters(text).values()}
    unsupported |= {f"{kind} rope" for kind in LENGTH_DEPENDENT_ROPE if kind in rope_types}
    return sorted(unsupported)


def _has_key_value_heads(text: Any) -> bool:
    """Return whether the number of key-value heads is a setting of the family.

    A config keeps any key of config.json, also one that its family ignores.
    """
    is_own = not type(text).__module__.startswith("transformers.")  # code that comes with a model
    return hasattr(text if is_own else type(text), "num_key_value_heads")


def get_rope_parameters(text: Any) -> dict[str, dict[str, Any]]:
    """Return rotary parameters by kind of layer; shared ones are under `full_attention`."""
    parameters = getattr(text, "rope_parameters", None) or {}
    by_kind = {kind: rope for kind, rope in parameters.items() if isinstance(rope, dict)}
    return by_kind or {"full_attention": parameters}
