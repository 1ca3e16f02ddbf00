"""What families of language models differ in, as far as serving them exactly goes."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Families whose sliding windows are served, by how their decoder takes the masks of its layers.
ONE_MASK = ("mistral", "mixtral", "qwen3_moe", "starcoder2")  # the window is of all layers, or none
MASK_BY_KIND = ("gemma3_text", "gpt_oss", "ministral", "olmo3", "qwen2", "qwen3")
SINKS = ("gpt_oss",)  # a logit of no key joins each softmax: only the plain attention has it
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
RAGGED_ROPE = ("dynamic", "longrope")  # what it does to a token depends on the longest row


def window(text: Any) -> int | None:
    """How many tokens, itself included, a token sees in sliding layers; None: no layer slides."""
    kinds = getattr(text, "layer_types", None)
    if text.model_type not in ONE_MASK and kinds and "sliding_attention" not in kinds:
        return None
    return getattr(text, "sliding_window", None)


def implementation(config: Any) -> str:
    """Of attention, in transformers: one that takes any mask."""
    return "eager" if config.get_text_config().model_type in SINKS else "sdpa"


def stored_as(config: Any) -> dict[str, Any]:
    """How to load weights that are stored quantized and computed with in full."""
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method") != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def masks(
    config: Any, full: Bool[Tensor, "batch 1 seq keys"],
    near: Bool[Tensor, "batch 1 seq keys"] | None, dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:  # fmt: skip
    """As the decoder takes them; `near` says which keys lie within the window of a query."""
    text = config.get_text_config()
    sliding = full if near is None else full & near
    if text._attn_implementation == "eager":  # it adds its mask to the logits
        full, sliding = (_added(mask, dtype) for mask in (full, sliding))
    if near is not None and text.model_type in MASK_BY_KIND:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def _added(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def unserved(config: Any) -> list[str]:
    """What of this model the runtime cannot serve exactly."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return ["encoder and decoder"]
    if not hasattr(text, "num_key_value_heads") or hasattr(text, "kv_lora_rank"):
        return ["no plain key-value heads"]
    kinds = set(getattr(text, "layer_types", None) or [])
    found = kinds - {"full_attention", "sliding_attention"}
    if window(text) and text.model_type not in ONE_MASK + MASK_BY_KIND:
        found.add(f"a window of {window(text)} tokens")
    found |= {f"{cap} {value}" for cap in SOFT_CAPS if (value := getattr(text, cap, None))}
    if getattr(text, "use_bidirectional_attention", None):
        found.add("attention in both directions")
    found |= {f"{kind} rope" for kind in RAGGED_ROPE if kind in rope_types(text)}
    return sorted(found)


def ropes(text: Any) -> dict[str, dict[str, Any]]:
    """Parameters of rotary positions by kind of layer; one entry where all layers share them."""
    given = getattr(text, "rope_parameters", None) or {}
    by_kind = {kind: rope for kind, rope in given.items() if isinstance(rope, dict)}
    return by_kind or {"full_attention": given}


def rope_types(text: Any) -> set[str]:
    return {rope.get("rope_type", "default") for rope in ropes(text).values()}
