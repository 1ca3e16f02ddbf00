"""Check that stored weights are those of the model that their config.json describes.

transformers fills what a checkpoint lacks with random weights, and ignores what it does not know.
Here it loads names and shapes without values, with all its renaming and fusing.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import load_state_dict
from transformers.quantizers.auto import AutoHfQuantizer, get_hf_quantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from models.io.errors import require
from models.targets import architectures
from models.targets.config import ModelSource
from models.targets.load_errors import CONFIG_FILE, report_load_errors

# Of from_pretrained, which then returns the model with a report of its missing, unknown and misshapen tensors.
REPORTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def check_stored_weights(source: ModelSource, model: Any) -> None:
    """Raise UserError unless the stored tensors are those of `model`, which is on `meta`.

    Weights that are not on this machine yet pass, and so do quantized ones, whose layers
    transformers replaces; both are checked when they are loaded.
    """
    is_quantized = check_quantization(source, model.config)
    stored = read_shapes(source)
    if is_quantized or not stored:
        return
    _check_types(source, stored)
    with report_load_errors(source, "weights"), quiet_loading():
        _, report = type(model).from_pretrained(
            None, config=model.config, state_dict=stored, device_map="meta", dtype=model.dtype, **REPORTED
        )
    check_load_report(source, report)


def check_load_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Raise UserError if transformers missed a tensor, or found an unknown or misshapen one."""
    misshapen = sorted(
        f"{name} of shape {list(shape)} instead of {list(expected)}"
        for name, shape, expected in report["mismatched_keys"]
    )
    problems_by_kind = {
        "lacks": sorted(report["missing_keys"]),
        "has the unknown tensor": sorted(report["unexpected_keys"]),
        "has": misshapen,
    }
    problems = [
        f"{verb} {names[0]}" + (f" (and {len(names) - 1} more)" if names[1:] else "")
        for verb, names in problems_by_kind.items()
        if names
    ]
    require(
        not problems,
        f"{source.location_key}: must have the tensors that its {CONFIG_FILE} describes, got "
        f"{source.location!r}, which {', '.join(problems)}; save the model again, unwrapped and "
        "whole, with the config.json that belongs to it",
    )


def check_quantization(source: ModelSource, config: Any) -> bool:
    """Return whether the weights are quantized; raise UserError if they could not be read."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return False
    with report_load_errors(source, CONFIG_FILE), quiet_loading():
        is_read = AutoHfQuantizer.supports_quant_method(stored)
        if is_read:  # raises ImportError for a package that is not installed
            dequantize = architectures.dequantize_kwargs(config).get("quantization_config")
            get_hf_quantizer(copy.deepcopy(config), dequantize, None, True, {})
    require(
        is_read,
        f"{source.location_key}: must be quantized in a way that transformers reads, got "
        f"{stored['quant_method']!r} in {source.location!r}, which transformers "
        f"{transformers.__version__} does not; give the model without quantization",
    )
    return True


def stays_quantized(config: Any) -> bool:
    """Return whether the weights of a model that can be read are quantized in memory too."""
    return getattr(config, "quantization_config", None) is not None and not architectures.dequantize_kwargs(config)


def _check_types(source: ModelSource, stored: Mapping[str, Tensor]) -> None:
    """Raise UserError for numbers of 8 bits or fewer, which mean nothing without their scales."""
    for name, tensor in stored.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        require(
            tensor.dtype.itemsize > 1 or tensor.dtype is torch.bool,
            f"{source.location_key}: must have floating-point weights, or say in {CONFIG_FILE} how "
            f"they are quantized, got {name} as {dtype} in {source.location!r}; give the model "
            "without quantization",
        )


def read_shapes(source: ModelSource) -> dict[str, Tensor]:
    """Return all stored tensors without values; nothing if they are not on this machine."""
    stored = {}
    for path in find_weight_files(source):
        with report_load_errors(source, path.name):
            stored |= load_state_dict(str(path), map_location="meta")
    return stored


def find_weight_files(source: ModelSource) -> list[Path]:
    """Return the files that transformers would load; nothing if they are not on this machine."""
    folder = Path(source.location)
    if not folder.is_dir():
        return []
    with report_load_errors(source, SAFE_WEIGHTS_NAME):
        for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            if (folder / single).exists():
                return [folder / single]
            if (folder / index).exists():
                with report_load_errors(source, index):
                    shards = json.loads((folder / index).read_text())["weight_map"].values()
                return [folder / shard for shard in sorted(set(shards))]
        raise FileNotFoundError


@contextmanager
def quiet_loading(*, keeps_progress: bool = False) -> Iterator[None]:
    """Keep the report of transformers out of the output: its first problem is printed in a line."""
    verbosity, has_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not keeps_progress:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress:
            logging.enable_progress_bar()
