"""A reduced draft vocabulary: the most frequent tokens of the answers, so that the head is small.

Bytes and special tokens are always kept: without them a draft could neither end an answer nor spell
a word that it has no token for.
"""

from jaxtyping import Int
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from models.io.errors import require


def required_token_ids(tokenizer) -> list[int]:
    """Return the ids of the byte tokens and of all special and added tokens, ascending."""
    vocab = tokenizer.get_vocab()
    byte_fallback = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece
    byte_tokens = byte_fallback if byte_fallback[0] in vocab else ByteLevel.alphabet()
    byte_ids = {vocab[token] for token in byte_tokens if token in vocab}
    return sorted(byte_ids | set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def choose_kept_ids(counts: Int[Tensor, " vocab"], size: int, required_ids: list[int]) -> Int[Tensor, " draft_vocab"]:
    """Return the target ids of the draft vocabulary, in ascending order.

    `required_ids` are chosen first, then the most frequent tokens; ties are broken by ascending id.
    Raises UserError for a size out of range.

    >>> import torch
    >>> choose_kept_ids(torch.tensor([0, 5, 1, 9, 5]), 3, required_ids=[0])
    tensor([0, 1, 3])
    """
    vocab_size = len(counts)
    require(
        size <= vocab_size,
        f"draft.vocab_size: must be at most the target's {vocab_size} tokens, got {size}; null keeps them all",
    )
    # Gemma 3's head lacks one of its tokenizer's special tokens.
    required_ids = [token for token in required_ids if token < vocab_size]
    require(
        size >= len(required_ids),
        f"draft.vocab_size: must hold the {len(required_ids)} byte and special tokens, got {size}; raise it",
    )
    priority = counts.clone()
    priority[required_ids] = counts.max() + 1  # above every other token
    return priority.argsort(descending=True, stable=True)[:size].sort().values


def token_coverage(counts: Int[Tensor, " vocab"], kept_ids: Int[Tensor, " draft_vocab"]) -> float:
    """Return the share of the answer tokens that the draft vocabulary has."""
    return (counts[kept_ids].sum() / counts.sum()).item()
