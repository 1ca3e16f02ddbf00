"""A model that cannot be loaded completely is refused in a line with the fault, the file and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.checkpoints.fingerprints import tables_fingerprint
from models.drafts.options import CausalLMConf
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.losses.config import LossConf
from models.targets.config import ModelSource, TargetConf
from models.targets.loading import load_target
from models.targets.pretrained import check_pretrained, load_model, load_tables, load_tokenizer, read_eos_ids
from tests.support.commands.own_target import save_target
from tests.support.models.family_models import FAMILIES, family_model
from tests.support.models.tiny import CPU, new_draft, tiny_target

LAST, NAN = torch.tensor([313]), torch.nan
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("good"), num_hidden_layers=2)


@pytest.fixture
def folder(good, tmp_path) -> Path:
    """Return a copy of the good target that a test may break."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def get_refusal(check: Callable, source: ModelSource) -> str:
    with pytest.raises(UserError) as refused:
        check(source)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"{source.config_key}.path: must ")
    return line


def edit_weights(folder: Path, change: Callable[[dict], dict]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def edit_json(file: Path, **keys) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


# --- tensors that are not those of config.json ----------------------------------------------------


def drop_tensors(part: str) -> Callable[[dict], dict]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def prefix_names(prefix: str) -> Callable[[dict], dict]:
    return lambda tensors: {prefix + name: t for name, t in tensors.items()}


def scale_to_fp8(tensors: dict) -> dict:
    name = "model.layers.0.mlp.up_proj.weight"
    halved = (tensors[name] * 64).to(torch.float8_e4m3fn)
    return tensors | {name: halved, f"{name}_scale": torch.tensor(1 / 64)}


OTHER_TENSORS = {
    "no head": (drop_tensors("lm_head"), "which lacks lm_head.weight;"),
    "no layer": (drop_tensors("layers.1."), "lacks model.layers.1.input_layernorm.weight (and 10 more)"),
    "DDP": (prefix_names("module."), "has the unknown tensor module.lm_head.weight (and 24 more)"),
    "compile": (prefix_names("_orig_mod."), "has the unknown tensor _orig_mod.lm_head.weight"),
    "FSDP": (prefix_names("_fsdp_wrapped_module."), "unknown tensor _fsdp_wrapped_module.lm_head."),
    "value head": (
        lambda tensors: tensors | {"v_head.weight": torch.ones(1, 32)},
        "which has the unknown tensor v_head.weight;",
    ),
    "scales": (scale_to_fp8, "model.layers.0.mlp.up_proj.weight as float8_e4m3fn"),
    "no scales": (
        lambda tensors: {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()},
        "lm_head.weight as float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_tensors_that_are_not_the_models_are_named_before_values_are_read(case, folder):
    change, message = OTHER_TENSORS[case]
    edit_weights(folder, change)
    for source in (TargetConf(path=str(folder)), CausalLMConf(path=str(folder))):
        assert message in get_refusal(check_pretrained, source)
        assert message in get_refusal(lambda source: load_model(source, torch.float32), source)


SHAPES = {
    "intermediate_size": (96, "model.layers.0.mlp.down_proj.weight of shape [32, 64] instead of"),
    "vocab_size": (400, "has lm_head.weight of shape [314, 32] instead of [400, 32]"),
}


@pytest.mark.parametrize("key", SHAPES)
def test_a_config_of_another_size_is_refused_with_the_first_shape(key, folder):
    value, message = SHAPES[key]
    edit_json(folder / CONFIG, **{key: value})
    assert message in get_refusal(check_pretrained, TargetConf(path=str(folder)))


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_tensors_that_transformers_renames_and_fuses_are_no_fault(family, tmp_path):
    family_model(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / f"{WEIGHTS}.index.json").exists()
    check_pretrained(TargetConf(path=str(tmp_path)))


def test_a_lost_expert_is_a_fault(tmp_path):
    family_model("qwen3_moe").save_pretrained(tmp_path)
    edit_weights(tmp_path, drop_tensors("layers.2.mlp.experts.5."))
    message = "model.layers.2.mlp.experts.down_proj of shape [5,"
    assert message in get_refusal(check_pretrained, TargetConf(path=str(tmp_path)))


def test_a_tied_head_need_not_be_stored_and_weights_may_be_pickled(folder):
    edit_json(folder / CONFIG, tie_word_embeddings=True)
    edit_weights(folder, drop_tensors("lm_head"))
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    check_pretrained(TargetConf(path=str(folder)))
    model = load_model(TargetConf(path=str(folder)), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- files that cannot be read ------------------------------------------------------------------


def save_in_shards(folder: Path) -> Path:
    """Save the weights in shards; return the second of them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("model-*.safetensors"))[1]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / WEIGHTS).unlink()


AGAIN = "; copy or download the file again"
UNREADABLE = {
    "a lost shard": (lambda f: save_in_shards(f).unlink(), "(model-00002-of-", ": no such file)" + AGAIN),
    "a cut shard": (lambda f: truncate(save_in_shards(f)), "(model-00002-of-", "not fully covered)" + AGAIN),
    "cut": (lambda f: truncate(f / WEIGHTS), f"({WEIGHTS}: ", "not fully covered)" + AGAIN),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), f"({WEIGHTS}: an empty file)", AGAIN),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"({WEIGHTS}: no such file)", AGAIN),
    "a pointer": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        f"({WEIGHTS}: a pointer of Git LFS, not the file itself)",
        "(git lfs pull in a clone)",
    ),
    "a cut config": (lambda f: truncate(f / CONFIG), f"({CONFIG}: ", "not a valid JSON file)" + AGAIN),
    "an unknown model": (lambda f: edit_json(f / CONFIG, model_type="mystery"), f"({CONFIG}: ", "`mystery`"),
    "an unknown rope": (
        lambda f: edit_json(f / CONFIG, rope_parameters={"rope_type": "odd", "rope_theta": 1e4}),
        f"({CONFIG}: KeyError 'odd')",
        AGAIN,
    ),
    "an adapter": (write_adapter, "no such file)", "; merge the adapter into its base model"),
    "custom code": (
        lambda f: edit_json(f / CONFIG, model_type="odd", auto_map={"AutoConfig": "odd.Odd"}),
        "custom code",
        "then set target.trust_remote_code=true",
    ),
    "no package": (
        lambda f: edit_json(
            f / CONFIG,
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {},
            },
        ),
        "pip install compressed-tensors",
        "; install the package",
    ),
    "an unknown quantization": (
        lambda f: edit_json(f / CONFIG, quantization_config={"quant_method": "modelopt"}),
        "got 'modelopt'",
        "; give the model without quantization",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_with_cause_and_remedy(case, folder):
    break_model, *parts = UNREADABLE[case]
    break_model(folder)
    line = get_refusal(check_pretrained, TargetConf(path=str(folder)))
    assert all(part in line for part in parts), line
    assert "network" not in line


def rewrite_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    edit_json(folder / "tokenizer.json", model=tokenizer["model"] | {"type": "Other"})


BAD_TOKENIZERS = {
    "of a newer format": rewrite_tokenizer,
    "cut": lambda f: truncate(f / "tokenizer.json"),
    "a pointer": lambda f: (f / "tokenizer.json").write_text("version https://git-lfs\n"),
    "missing": lambda f: [(f / f"tokenizer{end}.json").unlink() for end in ("", "_config")],
}


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_read_is_named(case, folder):
    BAD_TOKENIZERS[case](folder)
    line = get_refusal(load_tokenizer, TargetConf(path=str(folder)))
    assert "tokenizer.json" in line
    assert "network" not in line


def test_a_model_needs_no_generation_config_but_a_broken_file_is_named(folder):
    file, source = folder / "generation_config.json", TargetConf(path=str(folder))
    ids = read_eos_ids(source)
    file.write_text('["no object"]')
    assert file.name in get_refusal(read_eos_ids, source)
    file.unlink()
    assert read_eos_ids(source) == ids


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_target_whose_logits_are_not_finite_is_refused_with_the_weight(value, folder):
    name = "model.layers.1.mlp.down_proj.weight"
    edit_weights(folder, lambda tensors: tensors | {name: tensors[name].fill_(value)})
    with pytest.raises(UserError, match=f"logits must be finite, got .*, whose weight {name} is"):
        load_target(TargetConf(path=str(folder)), CPU)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_draft_with_weights_that_are_not_finite_is_refused(value, tmp_path):
    target = tiny_target(seed=0)
    draft = new_draft(target)
    draft.fc.weight.data[3, 5] = value
    draft.save(tmp_path, target)
    with pytest.raises(UserError, match=r"checkpoint: .* has fc\.weight with values that are not"):
        load_draft(tmp_path, target)


def test_a_draft_model_with_weights_that_are_not_finite_is_refused_even_as_a_start(folder):
    target = load_target(TargetConf(path=str(folder)), CPU)
    name = "model.embed_tokens.weight"  # of a token that may never occur
    edit_weights(folder, lambda tensors: tensors | {name: tensors[name].index_fill(0, LAST, NAN)})
    with pytest.raises(UserError, match=rf"checkpoint: weights must be finite, .* whose {name} is"):
        load_draft(folder, target)
    start = CausalLMConf(path=str(folder))
    with pytest.raises(UserError, match=rf"draft\.path: weights must be finite, .* whose {name}"):
        build_draft(start, target, loss=LossConf(), seed=0)


@pytest.mark.parametrize("architectures", [None, [], "[]", 3])
def test_a_draft_of_no_architecture_is_refused_with_the_known_architectures(architectures, tmp_path):
    target = tiny_target(seed=0)
    new_draft(target).save(tmp_path, target)
    edit_json(tmp_path / CONFIG, architectures=architectures)
    with pytest.raises(UserError, match="checkpoint: architecture must be one of"):
        load_draft(tmp_path, target)


# --- embeddings and head alone ----------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_and_head_are_read_without_the_layers(tmp_path, family, is_tied):
    model = family_model(family)
    if is_tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path)
    tables = load_tables(TargetConf(path=str(tmp_path)), torch.float32)
    assert tables_fingerprint(tables) == tables_fingerprint(model)
    assert not any(".layers." in name for name, _ in tables.named_parameters())
    assert tables.config.num_hidden_layers == model.config.num_hidden_layers
