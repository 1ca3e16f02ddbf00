"""Any model with softmax attention is a target; the others are refused by name."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    T5Config,
)

from data.features.target_pass import run_target
from models.device.memory_trace import fake_model
from models.io.errors import UserError
from models.meta_model import MetaTarget
from models.targets.config import TargetConf
from models.targets.loading import freeze_model, load_target
from tests.support.models.tiny import CPU, VOCAB, tiny_config, tiny_target, tiny_tokenizer
from train.planning.trace import fullest_batch

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@torch.no_grad()
def test_hidden_states_captured_layers_and_logits_are_those_of_transformers(target):
    """Captured layer i is hidden state i."""
    ids = torch.tensor([[5, 9, 2, 7, 3]])
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    theirs = target.model(ids, output_hidden_states=True)
    ours = target.forward_hidden(ids, positions=torch.arange(5)[None], mask=mask, layers=list(range(6)))
    for i, captured in enumerate(ours.captured.chunk(6, -1)):
        torch.testing.assert_close(captured, theirs.hidden_states[i])
    torch.testing.assert_close(ours.hidden, theirs.hidden_states[-1])
    torch.testing.assert_close(target.logits(ours.hidden), theirs.logits)


def test_the_target_is_frozen_and_stores_no_layer_inputs_where_none_are_captured(target):
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    ids = torch.tensor([[5, 9]])
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    seen = target.forward_hidden(ids, positions=torch.arange(2)[None], mask=mask, layers=[])
    assert seen.captured is None
    assert target._run_layers.state.layer_inputs == {}


def test_a_pass_keeps_the_inputs_of_captured_layers_alone():
    """A deeper model takes no more memory, its masks and hidden states aside."""
    peaks = {}
    for layers in (4, 8):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(tiny_config(num_hidden_layers=layers))
            outline = MetaTarget(model, name="outline", device=CPU)
        with fake_model([model], vocab=[]) as tracer, tracer.trace_phase("pass") as phase, torch.no_grad():
            batch = fullest_batch(1, 64)
            run_target(outline, [2], batch)
        weights = sum(p.nbytes for p in model.parameters())
        peaks[layers] = phase.peak_bytes.total() - weights
    assert peaks[8] - peaks[4] < 64 * model.config.hidden_size * 4


@pytest.mark.parametrize(("eos", "ids"), [(None, []), (3, [3]), ([3, 4], [3, 4])])
def test_end_tokens_are_those_of_the_generation_config(eos, ids):
    target = tiny_target(seed=0)
    target.model.generation_config.eos_token_id = eos
    assert target.eos_ids == ids


@pytest.mark.parametrize("eos", [None, 0])
def test_a_target_whose_answers_nothing_ends_is_told_with_the_token_to_add(eos, target, tmp_path, caplog):
    model = copy.deepcopy(target.model)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    load_target(TargetConf(path=str(tmp_path)), CPU)
    assert ("no eos_token_id; add that of the tokenizer's end, 0" in caplog.text) == (eos is None)


def test_a_saved_target_is_the_same_target(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = load_target(TargetConf(name=str(tmp_path)), CPU)
    assert again.fingerprint == target.fingerprint
    assert again.tokenizer_fingerprint == target.tokenizer_fingerprint
    assert (again.num_layers, again.hidden_size, again.vocab_size) == (6, 32, VOCAB)


ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0}
LONG: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
UNSERVED = {
    "gemma2: a window of 4096 tokens, attn_logit_softcapping 50.0": Gemma2Config(**SMALL, final_logit_softcapping=None),
    "gemma3_text: final_logit_softcapping 30.0": Gemma3TextConfig(**SMALL, final_logit_softcapping=30.0),
    "gemma3_text: attention in both directions": Gemma3TextConfig(**SMALL, use_bidirectional_attention=True),
    "phi3: a window of 8 tokens": Phi3Config(**SMALL, sliding_window=8),
    "phi3: longrope rope": Phi3Config(**SMALL, rope_parameters=ROPE | LONG | {"rope_type": "longrope"}),
    "llama: dynamic rope": LlamaConfig(**SMALL, rope_parameters=ROPE | {"rope_type": "dynamic"}),
    "llama4_text: chunked_attention": Llama4TextConfig(**SMALL),
    "qwen3_next: linear_attention": Qwen3NextConfig(**SMALL | {"num_hidden_layers": 4}),
    "gpt2: no plain key-value heads": GPT2Config(),
    "mamba: no plain key-value heads": MambaConfig(),
    "deepseek_v3: no plain key-value heads": DeepseekV3Config(),
    "t5: encoder and decoder": T5Config(),
}


@pytest.mark.parametrize("family", UNSERVED)
def test_other_attention_is_refused_by_name_before_weights_are_read(family, tmp_path):
    UNSERVED[family].save_pretrained(tmp_path)  # there are no weights to be read
    with pytest.raises(UserError) as refused:
        load_target(TargetConf(name=str(tmp_path)), CPU)
    assert str(refused.value).startswith("target.name: ")
    assert f"({family})" in str(refused.value)
    assert "choose another target" in str(refused.value)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (GraniteForCausalLM, GraniteConfig(**SMALL, logits_scaling=8.0)),
        (CohereForCausalLM, CohereConfig(**SMALL, logit_scale=0.0625)),
    ],
)
def test_logits_changed_after_the_head_are_refused_by_name(family, config):
    with pytest.raises(UserError, match=rf"must not scale .* \({family.__name__}\)"):
        freeze_model(family(config), tiny_tokenizer(), name="scaled", device=CPU)


def test_a_model_that_cannot_be_reached_is_refused_with_the_remedy(tmp_path):
    for name in ("nobody/nothing", str(tmp_path / "nowhere")):
        with pytest.raises(UserError) as refused:
            load_target(TargetConf(name=name), CPU)
        message = str(refused.value)
        assert message.startswith(f"target.name: must be a reachable model, got '{name}'")
        assert message.endswith("without a network give a local copy by target.path=DIR")
        assert "\n" not in message


def test_a_copy_of_the_model_runs_its_own_layers(target):
    ids = torch.arange(5)[None]
    before = target.model(ids).logits
    other = copy.deepcopy(target.model)
    for parameter in other.get_decoder().layers.parameters():
        parameter.zero_()
    embedded = other.get_input_embeddings()(ids)  # layers of zeros add nothing to it
    assert torch.equal(other(ids).logits, other.lm_head(other.get_decoder().norm(embedded)))
    assert torch.equal(target.model(ids).logits, before)
