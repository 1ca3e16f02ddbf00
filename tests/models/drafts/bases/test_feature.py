"""The layer of a draft computes as its config.json states, for every family of targets."""

import json
from typing import Any

import pytest
import torch
import transformers

from models.drafts.options import Eagle1Conf, Eagle3Conf, HydraConf
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.losses.config import LossConf
from models.targets.architectures import find_unsupported
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.models.family_models import HEADS, SHAPE
from tests.support.models.tiny import CPU, new_draft, tiny_target, tiny_tokenizer

METHODS = [Eagle3Conf(layers=[1, 2, 3]), Eagle1Conf(), HydraConf()]
# the further keys of each family's config, and the epsilon of its norms
EPSILONS: dict[str, tuple[dict[str, Any], float]] = {
    "Starcoder2": ({"sliding_window": None, "norm_epsilon": 3e-5}, 3e-5),
    "StableLm": ({"layer_norm_eps": 4e-5, "partial_rotary_factor": 0.25}, 4e-5),
    "Nemotron": ({"norm_eps": 5e-5}, 5e-5),
    "Cohere": ({"logit_scale": 1.0, "layer_norm_eps": 6e-5}, 6e-5),
    "Lfm2": ({"layer_types": ["full_attention"] * 4, "norm_eps": 7e-5}, 7e-5),
    "Qwen3": ({"rms_norm_eps": 8e-5}, 8e-5),
    "Olmo": ({}, 1e-6),  # it has no such key
    "Phi": ({"layer_norm_eps": 9e-5, "partial_rotary_factor": 0.5}, 9e-5),
    "Phi3": ({"sliding_window": None, "partial_rotary_factor": 0.5, "rms_norm_eps": 2e-5}, 2e-5),
    "Glm": ({"partial_rotary_factor": 0.5, "head_dim": 32, "rms_norm_eps": 1e-5}, 1e-5),
}


def build_target(family: str, **keys: Any) -> Target:
    config = getattr(transformers, f"{family}Config")(**SHAPE | keys)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return freeze_model(model, tiny_tokenizer(), name=family, device=CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, r"draft.heads: must be at least 1, got 0"),
        ({"kv_heads": 0}, r"draft.kv_heads: must be at least 1, got 0"),
        ({"head_size": 7}, r"draft.head_size: must be even and positive, got 7"),
        ({"intermediate_size": 0}, r"draft.intermediate_size: must be at least 1, got 0"),
        ({"heads": 1, "kv_heads": 2}, r"draft.kv_heads: must divide the attention heads, got 2 and 1; "),
    ],
)
def test_sizes_that_no_attention_layer_can_have_are_refused(target, options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        build_draft(Eagle3Conf(layers=[1, 2, 3], **options), target, loss=LossConf(), seed=0)


@pytest.mark.parametrize("family", EPSILONS)
def test_every_family_is_drafted_for_by_the_epsilon_that_it_states(family, tmp_path):
    keys, epsilon = EPSILONS[family]
    target = build_target(family, **keys)
    for conf in METHODS:
        if conf.method == "eagle1" and family == "Phi":  # refused for the bias of Phi's head
            continue
        draft: Any = build_draft(conf, target, loss=LossConf(), seed=0)
        assert draft.config.rms_norm_eps == epsilon
        draft.save(tmp_path / conf.method, target)
        written = json.loads((tmp_path / conf.method / "config.json").read_text())
        rotated = draft.rotary(torch.zeros(1, 1, 64), torch.zeros(1, 1, dtype=torch.int64))[0]
        # as engines read it: the entire head, unless a key says otherwise
        stated = written["rope_parameters"].get("partial_rotary_factor", 1.0)
        assert rotated.shape[-1] == stated * written["head_dim"]
        assert "partial_rotary_factor" not in written
        load_draft(tmp_path / conf.method, target)


def test_rotary_keys_that_the_layer_ignores_are_not_stated():
    """Only the target has sections for the positions of an image."""
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 6, 6]}
    target = build_target("Qwen3", head_dim=32, rope_parameters=rope)
    draft: Any = build_draft(METHODS[0], target, loss=LossConf(), seed=0)
    assert draft.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("family", ["GPTNeoX", "Bloom", "Falcon"])
def test_a_family_without_key_value_heads_is_refused_though_its_config_has_the_key(family):
    keys = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_key_value_heads")}
    config = getattr(transformers, f"{family}Config")(**keys)
    assert find_unsupported(config) == ["no plain key-value heads"]


EXPERTS_ALONE = {key: value for key, value in HEADS.items() if key != "intermediate_size"}
REFUSED = {
    "draft.heads: the attention heads must divide": ("Qwen3", HEADS | {"num_attention_heads": 3}),
    "draft.intermediate_size: must be set for a target of solar_open": (
        "SolarOpen",
        EXPERTS_ALONE | {"n_routed_experts": 2, "moe_intermediate_size": 32},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_family_whose_shape_no_draft_layer_can_have_is_refused_by_name(message):
    family, keys = REFUSED[message]
    config = getattr(transformers, f"{family}Config")(**keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    target = tiny_target(seed=0)
    target.config = model.config
    for conf in METHODS:
        with pytest.raises(UserError) as refused:
            build_draft(conf, target, loss=LossConf(), seed=0)
        assert str(refused.value).startswith(message)


def test_a_draft_that_rotates_a_part_of_a_head_is_refused(tmp_path):
    target = tiny_target(seed=0)
    new_draft(target).save(tmp_path, target)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"checkpoint: .* whole heads, got partial_rotary_factor=0"):
        load_draft(tmp_path, target)
