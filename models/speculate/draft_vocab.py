"""A reduced draft vocabulary: the tokens the answers use, so that the draft's head is small.

Draft id i stands for target id i + d2t[i]; t2d says which target ids the draft has. Both are in the
checkpoint, as serving engines read them. Bytes and special tokens are always kept: without them a
draft could not end an answer, or spell what it has no word for.
"""

import torch
from jaxtyping import Bool, Int
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from models.errors import UserError


def always_kept(tokenizer) -> list[int]:
    """Ids of the byte tokens and of all special and added tokens, ascending."""
    vocab = tokenizer.get_vocab()
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece
    of_bytes = fallback if fallback[0] in vocab else ByteLevel.alphabet()
    kept = {vocab[token] for token in of_bytes if token in vocab}
    return sorted(kept | set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def choose(
    counts: Int[Tensor, " vocab"], size: int | None, always: list[int]
) -> Int[Tensor, " draft_vocab"]:
    """Target ids of the draft vocabulary, ascending: `always`, then the most frequent.

    Equally frequent tokens are taken by ascending id. None takes the whole vocabulary.

    >>> choose(torch.tensor([0, 5, 1, 9, 5]), 3, always=[0])
    tensor([0, 1, 3])
    """
    vocab_size = len(counts)
    size = vocab_size if size is None else size
    if size > vocab_size:
        raise UserError(
            f"draft.vocab_size: must be at most the target's {vocab_size} tokens, got {size}; "
            "null keeps them all"
        )
    always = [token for token in always if token < vocab_size]  # Gemma 3's head lacks one
    if size < len(always):
        raise UserError(
            f"draft.vocab_size: must hold the {len(always)} byte and special tokens, got {size}; "
            f"give at least {len(always)}, or null for all {vocab_size} tokens"
        )
    rank = counts.clone()
    rank[always] = counts.max() + 1
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def offsets(kept_ids: Int[Tensor, " draft_vocab"]) -> Int[Tensor, " draft_vocab"]:
    """d2t: what to add to a draft id to get its target id.

    >>> offsets(torch.tensor([0, 2, 5]))
    tensor([0, 1, 3])
    """
    return kept_ids - torch.arange(len(kept_ids), device=kept_ids.device)


def kept_ids(d2t: Int[Tensor, " draft_vocab"]) -> Int[Tensor, " draft_vocab"]:
    """Target ids of the draft vocabulary: `offsets` undone."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def membership(kept_ids: Int[Tensor, " draft_vocab"], vocab_size: int) -> Bool[Tensor, " vocab"]:
    """t2d: which target ids the draft has.

    >>> membership(torch.tensor([0, 2]), 4)
    tensor([ True, False,  True, False])
    """
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=kept_ids.device)
    return t2d.index_fill(0, kept_ids, True)


def coverage(counts: Int[Tensor, " vocab"], kept_ids: Int[Tensor, " draft_vocab"]) -> float:
    """Share of the answer tokens that the draft vocabulary has."""
    return (counts[kept_ids].sum() / counts.sum()).item()
