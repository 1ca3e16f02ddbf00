"""Fingerprints follow what a model computes and which tokens it has, and nothing else."""

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.checkpoints.fingerprints import target_fingerprint, tokenizer_fingerprint


def tiny_target(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | changes))


def tiny_tokenizer(words, eos="c"):
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)


def test_a_target_has_the_same_fingerprint_in_every_precision():
    target = tiny_target()
    fingerprint = target_fingerprint(target)
    assert fingerprint == target_fingerprint(target.bfloat16())
    assert len(fingerprint) == 64


def test_other_weights_or_settings_change_the_fingerprint():
    tuned = tiny_target()
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    targets = [
        tiny_target(),
        tiny_target(seed=1),
        tiny_target(rms_norm_eps=1e-3),
        tuned,
        tiny_target(num_key_value_heads=4),
    ]
    assert len({target_fingerprint(target) for target in targets}) == len(targets)


def test_a_tokenizer_fingerprint_follows_its_tokens():
    same = [tiny_tokenizer("abc"), tiny_tokenizer("abc")]
    same[1](["a", "b"], truncation=True, max_length=1)  # leaves settings behind
    others = [tiny_tokenizer("bac"), tiny_tokenizer("abc", eos="a")]
    prints = [tokenizer_fingerprint(tokenizer) for tokenizer in same + others]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
