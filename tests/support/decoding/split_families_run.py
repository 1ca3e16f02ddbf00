"""Decode with split targets of families: split_families_run.py FOLDER NAME,NAME; results in FOLDER/rank-N.json."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from infer.engine.decode import Decoder
from models.drafts.options import Eagle3Conf
from models.drafts.registry import build_draft, load_draft
from models.losses.config import LossConf
from models.parallel.processes import connect_processes, leave_processes
from models.targets.config import TargetConf
from models.targets.loading import load_split_target, load_target
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from tests.support.decoding.split_run import decode_prompts, open_cpu
from tests.support.models.family_models import HEADS, SLIDING, YARN
from tests.support.models.tiny import chain, tiny_tokenizer, tree
from tests.support.runs import launch_script
from tests.support.runs.parallel_run import count_held

FOUR_HEADS: dict[str, Any] = HEADS | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 63,
}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**FOUR_HEADS),
    "qwen3": lambda: transformers.Qwen3Config(**FOUR_HEADS),
    "olmo3": lambda: transformers.Olmo3Config(**FOUR_HEADS | {"vocab_size": 65}, layer_types=4 * ["full_attention"]),
    "gemma3": lambda: transformers.Gemma3TextConfig(**FOUR_HEADS, **SLIDING, query_pre_attn_scalar=8),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**FOUR_HEADS, **EXPERTS, moe_intermediate_size=32, num_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **FOUR_HEADS, **SLIDING, **EXPERTS, num_local_experts=8, rope_parameters=YARN
    ),
}
COMPILED = ("qwen3_moe", "gpt_oss")


def save_families(folder: Path, names: Sequence[str]) -> dict[str, Target]:
    """Save a target and a draft of each family, and return the targets."""
    targets = {}
    for name in names:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).save_pretrained(folder / name)
        tiny_tokenizer(64).save_pretrained(folder / name)
        targets[name] = load_target(TargetConf(path=str(folder / name)), open_cpu(compiles=False))
        conf = Eagle3Conf(vocab_size=None, layers=[0, 1, 2])
        build_draft(conf, targets[name], loss=LossConf(), seed=0).save(folder / name / "draft", targets[name])
    return targets


def decode_family(target: Target, draft: Path) -> list[list[list[int]]]:
    """Decode greedily by a chain, and sampled by a dynamic tree."""
    return [
        decode_prompts(
            Decoder(
                target,
                load_draft(draft, target),
                shape,
                sampling=SamplingConf(temperature=temperature),
                slots=64,
                batch=2,
            )
        )
        for shape, temperature in ((chain(2), 0.0), (tree(2), 1.0))
    ]


def decode_split(folder: Path, names: Sequence[str], *, processes: int) -> None:
    """Write what a single process decodes to FOLDER/alone.json, and what each of several does."""
    alone = {
        name: decode_family(target, folder / name / "draft") for name, target in save_families(folder, names).items()
    }
    (folder / "alone.json").write_text(json.dumps(alone))
    launch_script("../decoding/split_families_run.py", folder, ",".join(names), processes=processes)


def run_rank(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    connect_processes("cpu")
    answers, held, processes = {}, {}, dist.get_world_size()
    for name in names:
        conf, draft = TargetConf(path=str(folder / name)), folder / name / "draft"
        target = load_split_target(conf, open_cpu(compiles=False), tensor=processes)
        answers[name] = decode_family(target, draft)
        held[name] = count_held(target.model) / target.num_parameters
    for name in sorted(set(COMPILED) & set(names)):
        target = load_split_target(TargetConf(path=str(folder / name)), open_cpu(compiles=True), tensor=processes)
        assert target.device.compiles
        answers[f"{name}, compiled"] = decode_family(target, folder / name / "draft")
    result = {"answers": answers, "held": held}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))
    leave_processes()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2].split(","))
