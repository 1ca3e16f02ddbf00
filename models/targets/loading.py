"""Load the target: its model, frozen and moved to the device, with its tokenizer."""

from collections.abc import Callable
from typing import Any

from models.checkpoints.tokenizer_files import find_tokenizer_folder
from models.device.device import Device
from models.targets.config import ModelSource, TargetConf
from models.targets.pretrained import load_model, load_tokenizer, read_model_config
from models.targets.target import Target


def load_target(
    conf: TargetConf, device: Device, *, name: str | None = None, load_part: Callable[[ModelSource], Any] | None = None
) -> Target:
    """Load the model, freeze it and move it to the device; return it with its tokenizer.

    `load_part` loads a model that is divided among several devices, and leaves it there. Raise
    UserError for a model that is missing or cannot be served exactly.
    """
    read_model_config(conf)
    model = load_part(conf) if load_part else load_model(conf, device.dtype)
    target = Target(model, load_tokenizer(conf), name=name or conf.path or conf.name, device=device)
    target.tokenizer_folder = find_tokenizer_folder(conf.location, conf.revision)
    if not load_part:  # after the checks, which a lazy device would compile
        model.to(device.torch_device)
    return target
