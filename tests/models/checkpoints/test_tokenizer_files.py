"""A checkpoint has the tokenizer files of its target, so that a reader of the target reads the draft."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoTokenizer

from models.checkpoints.tokenizer_files import PATTERNS, find_tokenizer_folder
from models.drafts.options import CausalLMConf, InitFrom, LoraConf, Medusa2Conf
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.targets.loading import load_target
from tests.support.commands.own_target import save_target
from tests.support.models.tiny import CPU

METHODS = [CausalLMConf(init_from=InitFrom.pruned, layers=[0, 1]), Medusa2Conf(lora=LoraConf(rank=2))]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Save a target with the tokenizer files that transformers 4 and other tools wrote."""
    folder = save_target(tmp_path / "target", num_hidden_layers=2)
    config = folder / "tokenizer_config.json"
    written = json.loads(config.read_text()) | {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": ["<|im_start|>"],
    }
    config.write_text(json.dumps(written, indent=7))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    return folder


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    files = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    files |= set(folder.glob("additional_chat_templates/*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.parametrize("conf", METHODS, ids=lambda conf: conf.method)
def test_every_file_of_tokenizer_and_processor_is_copied_unchanged_even_over_an_earlier_save(conf, folder, tmp_path):
    target = load_target(TargetConf(path=str(folder)), CPU)
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    for _ in range(2):
        draft.save(tmp_path / "checkpoint", target)
    (saved,) = (path.parent for path in (tmp_path / "checkpoint").rglob("tokenizer.json"))
    expected = read_tokenizer_files(folder)
    names = {"tokenizer.json", "merges.txt", "preprocessor_config.json", "additional_chat_templates/rag.jinja"}
    assert names <= set(expected)
    assert read_tokenizer_files(saved) == expected
    again = AutoTokenizer.from_pretrained(saved)
    assert again.get_vocab() == target.tokenizer.get_vocab()
    assert again.get_chat_template() == target.tokenizer.get_chat_template()


def test_the_files_of_a_hub_model_are_those_of_its_revision(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--some--model"
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "refs" / revision).write_text(commit)
        shutil.copytree(folder, cache / "snapshots" / commit)
        source = TargetConf(name="some/model", revision=revision)
        assert find_tokenizer_folder(source.location, source.revision) == cache / "snapshots" / commit
    assert find_tokenizer_folder("some/other", None) is None
