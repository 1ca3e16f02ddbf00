"""The target's distribution by its k likeliest tokens: a small teacher that can be stored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(kw_only=True)
class TopK:
    """The likeliest tokens, likeliest first, and the probability of all others together."""

    ids: Int[Tensor, "*batch k"]
    log_probs: Float[Tensor, "*batch k"]  # at temperature 1
    rest: Float[Tensor, "*batch"]
    vocab: int  # tokens of the target

    @classmethod
    def of(cls, logits: Float[Tensor, "*batch vocab"], k: int) -> "TopK":
        """Of the target's logits. `rest` is summed, not 1 - top: it may be tiny."""
        log_probs = logits.float().log_softmax(-1)
        top, ids = log_probs.topk(min(k, logits.shape[-1]), -1)
        rest = log_probs.exp().scatter(-1, ids, 0.0).sum(-1)
        return cls(ids=ids, log_probs=top, rest=rest, vocab=logits.shape[-1])

    def each(self, change: Callable[[Tensor], Tensor]) -> "TopK":
        """The same change made to all that is known of a position."""
        ids, log_probs, rest = map(change, (self.ids, self.log_probs, self.rest))
        return TopK(ids=ids, log_probs=log_probs, rest=rest, vocab=self.vocab)

    def split(self, rows: int) -> Iterator["TopK"]:
        """`rows` positions at a time."""
        parts = (t.split(rows) for t in (self.ids, self.log_probs, self.rest))
        for ids, log_probs, rest in zip(*parts, strict=True):
            yield TopK(ids=ids, log_probs=log_probs, rest=rest, vocab=self.vocab)
