"""The keys of config.json under the names that transformers 4 reads.

Readers on transformers 4 (NxD Inference) and converters that expect the older names (speculators) do
not find `rope_parameters` and `dtype`, and silently take theta 10,000 without scaling.
"""

from typing import Any

# Older configs keep these keys beside `rope_scaling`, not in it.
TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor")


def add_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the older names added, also in those nested in it.

    transformers 5 reads the older names too, and `rope_scaling` even before `rope_parameters`, so
    that both must agree: only this function writes them.

    >>> rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    >>> keys = add_older_keys({"rope_parameters": rope, "dtype": "bfloat16"})
    >>> keys["rope_theta"], keys["rope_scaling"], keys["torch_dtype"]
    (500000.0, {'rope_type': 'llama3', 'factor': 8.0}, 'bfloat16')
    """
    nested = {
        key: add_older_keys(value) for key, value in config.items() if isinstance(value, dict) and "model_type" in value
    }
    written = config | nested | _older_rope_keys(config.get("rope_parameters") or {})
    if "dtype" in config:
        written["torch_dtype"] = config["dtype"]
    return written


def _older_rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, which may hold an entry per kind of layer, under the older names.

    In older configurations `rope_scaling` applies only to full attention. Sliding layers have a
    base frequency of their own (Gemma 3).
    """
    full = rope.get("full_attention", rope)
    if not full:
        return {}
    top_level = {key: full[key] for key in TOP_LEVEL_KEYS if key in full}
    scaling = {key: value for key, value in full.items() if key not in TOP_LEVEL_KEYS}
    is_scaled = scaling.get("rope_type", "default") != "default"
    # Configurations of an entry per kind of layer that have no older form (Mellum's) read null as no rope at all.
    older = top_level | ({"rope_scaling": scaling if is_scaled else None} if is_scaled or full is rope else {})
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return older
