"""The target's distribution as its k likeliest tokens: small enough for a feature store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(kw_only=True)
class TopKLogits:
    """The k likeliest tokens in descending order, and the total probability of all others."""

    ids: Int[Tensor, "*batch k"]
    log_probs: Float[Tensor, "*batch k"]  # at temperature 1
    rest: Float[Tensor, "*batch"]  # probability of all other tokens
    vocab_size: int  # of the target

    @classmethod
    def from_logits(cls, logits: Float[Tensor, "*batch vocab"], k: int) -> "TopKLogits":
        """Build it from the target's logits."""
        log_probs = logits.float().log_softmax(-1)
        top, ids = log_probs.topk(min(k, logits.shape[-1]), -1)
        return cls(
            ids=ids,
            log_probs=top,
            # a sum over the others, as 1 - the sum of the top would lose tiny values
            rest=log_probs.exp().scatter(-1, ids, 0.0).sum(-1),
            vocab_size=logits.shape[-1],
        )

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "TopKLogits":
        """Return a copy whose tensors are `change` of these."""
        return TopKLogits(
            ids=change(self.ids), log_probs=change(self.log_probs), rest=change(self.rest),
            vocab_size=self.vocab_size,
        )  # fmt: skip

    def split(self, size: int) -> Iterator["TopKLogits"]:
        """Yield consecutive parts of `size` positions; the last may have fewer."""
        parts = (t.split(size) for t in (self.ids, self.log_probs, self.rest))
        for ids, log_probs, rest in zip(*parts, strict=True):
            yield TopKLogits(ids=ids, log_probs=log_probs, rest=rest, vocab_size=self.vocab_size)
