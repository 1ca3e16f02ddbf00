"""Save checkpoints of every kind with rotary settings that differ from every reader's defaults."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from models.drafts.options import CausalLMConf, DraftConf, Eagle1Conf, Eagle3Conf, HydraConf, InitFrom, Medusa2Conf
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.models.family_models import HEADS, SHAPE, SLIDING
from tests.support.models.tiny import CPU, tiny_tokenizer

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}

# a family and the older keys with the settings of its model
OLDER: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "gemma3": {"rope_theta": 2e6, "rope_scaling": LINEAR, "rope_local_base_freq": 2e4},
    "gpt_oss": {"rope_theta": 2.5e5, "rope_scaling": YARN},
}
NEWER: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**HEADS, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama3": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **HEADS,
        **SLIDING,
        rope_parameters={
            "full_attention": LINEAR | {"rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **HEADS, num_local_experts=2, num_experts_per_tok=2, rope_parameters=YARN | {"rope_theta": 2.5e5}
    ),
}
DRAFTS: dict[str, DraftConf] = {
    "eagle3": Eagle3Conf(layers=[1, 2, 3]),
    "eagle1": Eagle1Conf(),
    "hydra": HydraConf(num_layers=2),
    "medusa2": Medusa2Conf(),  # only its adapted target has rotary settings, its heads have none
    "draft model": CausalLMConf(init_from=InitFrom.pruned, layers=[1, 2]),  # each kind of layer once
}
SAVED = [(family, draft) for family in ("qwen3", "llama3") for draft in DRAFTS]
SAVED += [("gemma3", "draft model"), ("gpt_oss", "draft model")]


def build_target(family: str) -> Target:
    """Build a random target in bf16, the same at every call."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(NEWER[family](), dtype=torch.bfloat16)
    return freeze_model(model, tiny_tokenizer(), name=family, device=CPU)


def save_draft(family: str, draft: str, folder: Path) -> Path:
    """Save an untrained draft; return the folder whose config.json has rotary settings."""
    target = build_target(family)
    build_draft(DRAFTS[draft], target, loss=LossConf(), seed=0).save(folder, target)
    return next(folder.glob("target-*"), folder)


def edit_config(folder: Path, *, drop: Sequence[str] = (), **keys) -> None:
    """Change the values of these keys in a checkpoint's config.json, and remove those to drop."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
