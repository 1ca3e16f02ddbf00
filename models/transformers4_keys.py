"""Keys of config.json by which transformers 4 reads what transformers 5 writes under other names.

transformers 5 keeps the rotary settings in `rope_parameters` and the precision in `dtype`. Readers
on transformers 4 (NxD Inference) and converters that look for the older names (speculators) find
nothing there, take theta 10,000 without scaling, and say nothing.
"""

from typing import Any

OUTSIDE = ("rope_theta", "partial_rotary_factor")  # older configs keep them beside `rope_scaling`


def add_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Add the older names of a configuration and of those nested in it, with the same meaning.

    transformers 5 reads the older names too, and `rope_scaling` even before `rope_parameters`:
    both must be written together, by this function alone.

    >>> rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    >>> keys = add_older_keys({"rope_parameters": rope, "dtype": "bfloat16"})
    >>> keys["rope_theta"], keys["rope_scaling"], keys["torch_dtype"]
    (500000.0, {'rope_type': 'llama3', 'factor': 8.0}, 'bfloat16')
    """
    nested = {
        key: add_older_keys(value)
        for key, value in config.items()
        if isinstance(value, dict) and "model_type" in value
    }
    written = config | nested | _older_rope(config.get("rope_parameters") or {})
    if "dtype" in config:
        written["torch_dtype"] = config["dtype"]
    return written


def _older_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the older names of `rope_parameters`, which may hold one entry a kind of layer.

    Older configurations scale the full attention alone. Its sliding layers, where they differ, have
    a base of their own (Gemma 3).
    """
    full = rope.get("full_attention", rope)
    if not full:
        return {}
    outside = {key: full[key] for key in OUTSIDE if key in full}
    scaling = {key: value for key, value in full.items() if key not in OUTSIDE}
    scaled = scaling.get("rope_type", "default") != "default"
    older = outside | {"rope_scaling": scaling if scaled else None}
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return older
