"""Hashes of models, tokenizers and tensors, by which a draft is tied to its target."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.parallel.dtensor import full_tensor

# Settings that the weights do not show. RoPE is left out: a longer context is still the same
# target, and versions of transformers spell its settings differently.
_FINGERPRINT_KEYS = """
    model_type hidden_act num_attention_heads num_key_value_heads head_dim rms_norm_eps layer_norm_eps sliding_window
    num_experts_per_tok
""".split()  # noqa: SIM905 - a list would take a line for each name


def target_fingerprint(model) -> str:
    """Return a hash of a model's config, and of the name, shape and 64 values of each weight.

    Values are rounded to bf16, so that a model has the same fingerprint at every precision.
    Collective for a sharded model: call it on every rank that holds a shard.
    """
    config = model.config.get_text_config().to_dict()
    digest = _hash_json({key: config.get(key) for key in _FINGERPRINT_KEYS})
    return _hash_samples(digest, dict(model.named_parameters()))


def frozen_fingerprint(module: nn.Module) -> str:
    """Return the hash of the weights of a module that do not learn, as of a target's."""
    frozen = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
    return _hash_samples(hashlib.sha256(), frozen)


def _hash_samples(digest: Any, weights: Mapping[str, Tensor]) -> str:
    for name, weight in weights.items():
        flat = full_tensor(weight.detach()).flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64].contiguous().to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tables_fingerprint(model: Any) -> str:
    """Return a hash of the shape and 64 rows of embeddings and head, rounded to bf16; collective if it is sharded."""
    digest = hashlib.sha256()
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = full_tensor(table.weight.detach())
        rows = weight[:: max(1, len(weight) // 64)][:64].contiguous().to("cpu", torch.bfloat16)
        digest.update(str(list(weight.shape)).encode())
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the name and every value of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer) -> str:
    """Return a hash of each token with its id, and of the special ids."""
    vocab, special = sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)
    return _hash_json([vocab, special]).hexdigest()


def _hash_json(value: Any):
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode())
