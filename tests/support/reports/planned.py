"""Build a small target without weights, and a machine with room for it, to plan runs and decoding for."""

from dataclasses import replace
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.device.config import MachineConf
from models.device.device import Device
from models.device.memory_trace import TracedPhase
from models.drafts.base import Draft
from models.meta_model import MetaTarget
from tests.support.models.tiny import CPU, tiny_config
from train.config.run import TrainConf
from train.planning.layout import build_layout
from train.planning.trace import trace_run

VOCAB = 4096
HALF = Device(name="cpu", torch_device=CPU.torch_device, dtype=torch.bfloat16, compiles=False)
GENEROUS = MachineConf(
    name="generous",
    chips=2,
    cores=4,
    memory_gib=64.0,
    bandwidth_gb_s=100.0,
    tflops={"float32": 1.0, "bfloat16": 4.0},
    length_multiple=32,
    repeats_heads=True,
)


ALONE = replace(GENEROUS, chips=1, cores=1)


def config(**changes: Any) -> Qwen3Config:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
    return tiny_config(**heads, **sizes, max_position_embeddings=512, **changes)


def model_outline(device: Device) -> MetaTarget:
    with torch.device("meta"):
        return MetaTarget(Qwen3ForCausalLM(config()).to(device.dtype), name="outline", device=device)


def trace_alone(run: TrainConf, target: MetaTarget, draft: Draft, *, prompt_tokens: int) -> dict[str, TracedPhase]:
    """Trace a run of one process."""
    return trace_run(run, target, draft, build_layout(run, ALONE, 4, 1), prompt_tokens=prompt_tokens)
