"""Commands on checkpoints check the memory before they load weights."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conf.entry import compose
from infer.commands.evaluation import evaluate_checkpoints
from infer.commands.generation import generate_from_checkpoint
from infer.commands.tree_tuning import tune_checkpoints
from infer.config import EvalConf, GenerateConf
from infer.inputs.memory_check import GIB, DecodingSize, check_memory, count_draft_bytes, trace_decoding
from infer.tuning.config import TuneConf
from models.io.errors import UserError
from models.meta_model import build_meta_target
from models.targets.config import TargetConf
from tests.support.models.tiny import CPU, new_draft, tiny_config

SIZE = DecodingSize(batch=8, prompt_tokens=64, new_tokens=16, set_batch=lambda n: f"batch={n}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Return a folder with a target, a draft of it, and prompts of 64 tokens."""
    folder = tmp_path_factory.mktemp("memory")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    new_draft(target).save(folder / "draft", target)
    prompt = {"text": " ".join(map(str, range(1, 61))) + " 1 2 3 4"}
    (folder / "prompts.jsonl").write_text(8 * f"{json.dumps(prompt)}\n")
    return folder


@pytest.fixture
def no_weights(monkeypatch):
    """Let the loading of a model fail."""
    monkeypatch.delattr(transformers.AutoModelForCausalLM, "from_pretrained")


def build_memory_override(folder: Path, fewer: int, more: int) -> str:
    """Return an override under which `fewer` rows fit and `more` rows do not."""
    conf = TargetConf(path=str(folder / "target"))
    peaks = [trace_decoding(conf, CPU, SIZE, rows) for rows in (fewer, more)]
    draft = count_draft_bytes([folder / "draft"], CPU.dtype)
    return f"device.memory_gib={(sum(peaks) / 2 + draft) / 0.9 / GIB}"


def list_overrides(folder: Path, *overrides: str) -> list[str]:
    return [
        f"target.path={folder / 'target'}",
        f"checkpoint={folder / 'draft'}",
        "device=cpu",
        "device.compile=false",
        "device.precision=float32",
        *overrides,
    ]


@pytest.mark.usefixtures("no_weights")
def test_evaluation_tuning_and_answers_that_cannot_fit_are_refused_with_a_batch_that_fits(folder):
    memory, draft = build_memory_override(folder, 2, 4), folder / "draft"
    rule = r"^device\.memory_gib: must hold target, drafts and 8 rows of 80 tokens, which take at "
    rule += r"least [\d.]+ GiB, got [\d.]+ usable of [\d.]+; with {} it fits$"
    prompts = folder / "prompts.jsonl"

    overrides = [f"evaluation.prompts={prompts}", "evaluation.max_new_tokens=16", memory]
    conf = compose("eval", EvalConf, list_overrides(folder, *overrides))
    with pytest.raises(UserError, match=rule.format(r"evaluation\.batch_sizes=\[2\]")):
        evaluate_checkpoints(conf, [draft], folder / "out")

    overrides = [f"prompts={prompts}", "max_new_tokens=16", memory]
    conf = compose("tune", TuneConf, list_overrides(folder, "batch=[1,8]", *overrides))
    with pytest.raises(UserError, match=rule.format(r"batch=\[2\]")):
        tune_checkpoints(conf, [draft], folder / "out")
    conf = compose("generate", GenerateConf, list_overrides(folder, "batch=8", *overrides))
    with pytest.raises(UserError, match=rule.format("batch=2")):
        generate_from_checkpoint(conf, draft)


def test_the_batch_that_the_error_names_fits(folder):
    conf, memory = TargetConf(path=str(folder / "target")), build_memory_override(folder, 4, 8)
    gib = float(memory.partition("=")[2])
    with pytest.raises(UserError) as refused:
        check_memory(conf, [folder / "draft"], SIZE, CPU, gib)
    batch = int(re.search(r"with batch=(\d+) it fits", str(refused.value))[1])
    assert batch == 4
    check_memory(conf, [folder / "draft"], replace(SIZE, batch=batch), CPU, gib)
    with pytest.raises(UserError, match=r"; take a larger device$"):
        check_memory(conf, [folder / "draft"], SIZE, CPU, 1e-6)


def test_a_device_that_does_not_report_its_memory_is_not_checked(folder):
    silent = replace(CPU, name="xla", torch_device=torch.device("cpu"))
    check_memory(TargetConf(path="no such folder"), [folder / "draft"], SIZE, silent, None)


def test_embeddings_that_a_draft_reads_from_its_target_take_no_memory_of_their_own(folder, target):
    stored = load_file(folder / "draft" / "model.safetensors")
    table = target.model.get_input_embeddings().weight
    expected = sum(tensor.nbytes for tensor in stored.values()) - table.nbytes
    assert count_draft_bytes([folder / "draft"], torch.float32) == expected


def test_a_draft_counts_once_in_the_type_that_it_is_loaded_in(folder, tmp_path):
    """Some hubs keep a second copy of the weights beside those that transformers reads."""
    copied = shutil.copytree(folder / "draft", tmp_path / "draft")
    once = count_draft_bytes([copied], torch.bfloat16)
    shutil.copy(copied / "model.safetensors", copied / "consolidated.safetensors")
    assert count_draft_bytes([copied], torch.bfloat16) == once
    assert once < count_draft_bytes([copied], torch.float32) <= 2 * once


def test_packed_copies_of_a_draft_are_of_its_large_layers(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shapes = {"layer.weight": (400, 300), "small.weight": (40, 30), "embed_tokens2.weight": (400, 300)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    plain, packed = (count_draft_bytes([tmp_path], torch.float32, packs=packs) for packs in (False, True))
    assert packed - plain == 400 * 300 * 4


@pytest.mark.parametrize(("method", "is_checked"), [("bitnet", False), ("mxfp4", True)])
def test_weights_that_stay_quantized_are_not_judged_by_their_full_size(folder, tmp_path, caplog, method, is_checked):
    """Those of mxfp4 are loaded in full precision."""
    config = json.loads((folder / "target" / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with caplog.at_level("INFO"), pytest.raises(UserError) if is_checked else nullcontext():
        check_memory(TargetConf(path=str(tmp_path)), [], SIZE, CPU, 1e-6)
    assert ("memory: quantized weights take less" in caplog.text) is not is_checked


@pytest.mark.parametrize("config", ["dense", "experts"])
def test_a_process_of_a_split_target_needs_its_part(tmp_path, config):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "hidden_size": 64}
    experts = tiny_config(transformers.Qwen3MoeConfig, **sizes, num_experts=8, moe_intermediate_size=64)
    (tiny_config(**sizes) if config == "dense" else experts).save_pretrained(tmp_path)
    conf = TargetConf(path=str(tmp_path))
    whole, part = (trace_decoding(conf, CPU, SIZE, 1, tensor=tensor) for tensor in (1, 4))
    weights = 4 * build_meta_target(conf, CPU.dtype).num_parameters
    assert weights * 0.7 < whole - part < whole * 0.75
