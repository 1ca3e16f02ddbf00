"""The packed rows that every draft trains on."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(kw_only=True)
class Batch:
    """Packed training rows: each holds several documents or pieces of documents."""

    input_ids: Int[Tensor, "rows length"]
    answer_mask: Bool[Tensor, "rows length"]  # input_ids[t] is a token of an answer
    document_ids: Int[Tensor, "rows length"]  # number of the piece within its row, -1 = padding
    positions: Int[Tensor, "rows length"]  # restart at 0 in each piece
    # Tokens that weigh nothing: the start of a later piece, which repeats the end of the one before (data.overlap);
    # in a quick evaluation all that decoding does not draft.
    context_mask: Bool[Tensor, "rows length"] | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return a copy whose tensors are on `device`."""
        return Batch(**{name: x.to(device) for name, x in vars(self).items() if x is not None})

    def weigh_drafted_tokens(self) -> "Batch":
        """Return the batch with weight on what decoding drafts alone: the tokens of answers but each one's first."""
        follows_answer = F.pad(self.answer_mask[:, :-1], (1, 0))
        undrafted = ~(self.answer_mask & follows_answer)
        context = undrafted if self.context_mask is None else undrafted | self.context_mask
        return replace(self, context_mask=context)

    def attention_mask(self) -> Bool[Tensor, "rows 1 length length"]:
        """Return a causal mask within documents.

        Padding attends to earlier padding and itself, so that no query is without a key.
        """
        same_document = self.document_ids[:, :, None] == self.document_ids[:, None, :]
        position = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (same_document & (position <= position[:, None]))[:, None]
