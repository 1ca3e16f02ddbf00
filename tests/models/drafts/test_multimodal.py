"""Of a multimodal target, drafts read and train the text model alone."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from models.drafts.options import CausalLMConf, InitFrom, LoraConf, Medusa2Conf
from models.drafts.registry import build_draft, load_draft
from models.losses.config import LossConf
from models.targets.loading import freeze_model
from tests.support.models.tiny import CPU, VOCAB, batch_of, learn, tiny_config, tiny_tokenizer


def build_multimodal_target():
    text = tiny_config(Gemma3TextConfig, tie_word_embeddings=True, sliding_window=128)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"image_token_index": VOCAB - 3, "boi_token_index": VOCAB - 2, "eoi_token_index": VOCAB - 1}
    vision_config = vision | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision_config, eos_token_id=0, **tokens)
    return freeze_model(Gemma3ForConditionalGeneration(config), tiny_tokenizer(), name="multimodal", device=CPU)


PARTS = {"all weights": CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5])}
PARTS["adapters"] = replace(PARTS["all weights"], lora=LoraConf(rank=2))


@pytest.mark.parametrize("part", PARTS)
def test_of_a_multimodal_target_the_text_model_alone_learns_and_the_checkpoint_is_read_again(part, tmp_path):
    target = build_multimodal_target()
    draft = build_draft(PARTS[part], target, loss=LossConf(), seed=0)
    learn(draft, target, batch_of([[*range(1, 20)]]), steps=1)
    # Weights without a gradient would take memory, and end a run of several processes.
    assert all(weight.grad is not None for weight in draft.parameters() if weight.requires_grad)
    draft.save(tmp_path, target)
    merged = load_draft(tmp_path, target).model
    ids = torch.arange(1, 12)[None]
    torch.testing.assert_close(merged(ids).logits, draft.model(ids).logits)


def test_medusa2_adapts_the_text_model_of_a_multimodal_target_alone():
    target = build_multimodal_target()
    draft = build_draft(Medusa2Conf(heads=2), target, loss=LossConf(), seed=0)
    learn(draft, target, batch_of([[*range(1, 20)]]), steps=1)
    assert all(weight.grad is not None for weight in draft.parameters() if weight.requires_grad)
