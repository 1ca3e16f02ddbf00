"""A draft may be cut from its target: the layers that it keeps, their weights and its config."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from models.drafts.causal_lm import choose_layers, prune_layers
from models.drafts.options import CausalLMConf, InitFrom
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.losses.config import LossConf
from models.targets.modeling import keep_layers
from tests.support.models.tiny import build_target, tiny_config

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("family", ["qwen3", "llama", "smollm3"])
def test_a_pruned_target_is_the_target_without_the_other_layers(target, family):
    if family == "llama":
        target = build_target(LlamaForCausalLM, tiny_config(LlamaConfig))
    elif family == "smollm3":  # rotary positions in some layers
        target = build_target(SmolLM3ForCausalLM, tiny_config(SmolLM3Config, no_rope_layers=[1, 0, 1, 1, 0, 1]))
    layers = [0, 2, 5]
    conf = CausalLMConf(init_from=InitFrom.pruned, layers=layers)
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    expected = copy.deepcopy(target.model)
    for i, layer in enumerate(expected.get_decoder().layers):
        if i not in layers:  # then the layer adds nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    ids = torch.arange(1, 12)[None]
    torch.testing.assert_close(draft.model(ids).logits, expected(ids).logits)


def test_a_checkpoint_records_the_layers_that_its_draft_was_cut_by_default_from(target, tmp_path):
    draft = build_draft(CausalLMConf(init_from=InitFrom.pruned), target, loss=LossConf(), seed=0)
    draft.save(tmp_path, target)
    layers = load_draft(tmp_path, target).conf.layers
    assert layers == choose_layers(target.config, target.num_layers)


def test_dense_layers_among_experts_stay_dense():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1, 4]}
    target = build_target(Qwen3MoeForCausalLM, tiny_config(Qwen3MoeConfig, **experts))
    pruned = prune_layers(target, [0, 1, 5], copy_weights=True)
    kinds = [type(layer.mlp) for layer in target.model.get_decoder().layers]
    assert [type(layer.mlp) for layer in pruned.get_decoder().layers] == [kinds[0], kinds[1], kinds[0]]
    assert kinds[0] is not kinds[1]


def test_a_list_with_an_entry_for_each_layer_is_cut_with_the_layers():
    kinds = ["dense", "sparse", "dense", "sparse", "dense", "sparse"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_layer_types": kinds}
    config = tiny_config(MellumConfig, **experts, eos_token_id=[1, 2, 3, 4, 5, 6])
    kept = keep_layers(config, [1, 2])
    assert (kept.num_hidden_layers, kept.mlp_layer_types) == (2, ["sparse", "dense"])
    assert len(kept.layer_types) == 2
    assert kept.eos_token_id == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("by_layer", "expected"),
    [
        ({}, [0, 6, 11]),
        ({"layer_types": [SLIDING, FULL] * 6}, [0, 6, 11]),
        ({"layer_types": ([SLIDING] * 5 + [FULL]) * 2}, [0, 6, 11]),
        ({"layer_types": [SLIDING] * 8 + [FULL] + [SLIDING] * 3}, [0, 8, 11]),
        ({"layer_types": [FULL] * 12, "no_rope_layers": [1, 1, 1, 0] * 3}, [0, 6, 11]),
        ({"layer_types": [FULL] * 12, "no_rope_layers": [1, 0, 1, 1] * 3}, [1, 6, 11]),
    ],
)
def test_a_pruned_draft_has_each_kind_of_attention_that_its_target_has(by_layer, expected):
    assert choose_layers(SimpleNamespace(**by_layer), 12) == expected


def test_layers_of_a_kind_that_depends_on_their_place_are_refused():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    target = build_target(Glm4MoeForCausalLM, tiny_config(Glm4MoeConfig, **experts))
    with pytest.raises(UserError, match=r"^draft.layers: must keep the kind of each layer in its .*, got \[1, 3\]"):
        prune_layers(target, [1, 3], copy_weights=True)


def test_a_draft_of_a_quantized_target_has_plain_weights(target):
    quantized = copy.copy(target)
    quantized.model = copy.deepcopy(target.model)
    quantized.decoder = quantized.model.get_decoder()
    quantized.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    draft = prune_layers(quantized, [0, 5], copy_weights=False)
    assert not hasattr(draft.config, "quantization_config")
    quantized.decoder.layers[0].mlp = torch.nn.Identity()  # its weights have other names
    with pytest.raises(UserError, match=r"^draft.init_from: needs a target with plain weights, got pruned for"):
        prune_layers(quantized, [0, 5], copy_weights=True)


def test_a_random_start_is_drawn_from_the_seed(target):
    conf = CausalLMConf(init_from=InitFrom.random, layers=[0, 5])
    first, same, other = (build_draft(conf, target, loss=LossConf(), seed=s) for s in (0, 0, 1))
    weights = [d.model.model.layers[0].mlp.up_proj.weight for d in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
