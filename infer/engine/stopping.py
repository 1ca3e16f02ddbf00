"""Where an answer ends: at a token that ends it, behind a stop string, or at its longest length.

A round emits several tokens; what one token at a time would not have come to is cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """When decoding one token at a time would have stopped.

    A stop string counts where the answer's text holds it, the prompt's does not; the token that
    completes it is kept whole, as transformers does.
    """

    eos_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    text: Callable[[list[int]], str] | None = field(default=None, repr=False)  # of token ids

    def end(self, ids: list[int], *, known: int, limit: int) -> int | None:
        """How many of `ids` the answer has, the first `known` of which did not end it; None: more.

        >>> Stopping(eos_ids=frozenset([2])).end([5, 2, 7], known=0, limit=9)
        2
        """
        new = range(known, min(len(ids), limit))
        for i in new:
            if ids[i] in self.eos_ids:
                return self._string(ids[: i + 1], known) or i + 1
        return self._string(ids[:limit], known) or (limit if len(ids) >= limit else None)

    def _string(self, ids: list[int], known: int) -> int | None:
        """Tokens up to the one that completes a stop string."""
        if not self.strings or self.text is None or not self._stops(ids):
            return None
        return next(i for i in range(known + 1, len(ids) + 1) if self._stops(ids[:i]))

    def _stops(self, ids: list[int]) -> bool:
        assert self.text is not None
        text = self.text(ids)
        return any(string in text for string in self.strings)
