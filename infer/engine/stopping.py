"""The end of an answer: at an end token, after a stop string, or at its token limit.

A round emits several tokens; tokens that one-by-one decoding would not have reached are cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StopCriteria:
    """The conditions that end an answer, at the same token as decoding one token at a time.

    Stop strings are matched in the answer's text, not in the prompt's; the token that completes one
    is kept in full, as in transformers.
    """

    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    detokenize: Callable[[list[int]], str] | None = field(default=None, repr=False)  # of token ids

    def find_end(self, ids: list[int], *, num_checked: int, max_new_tokens: int) -> int | None:
        """Return the length at which `ids` end the answer, or None if it goes on.

        The first `num_checked` of `ids` are known not to end it.

        >>> criteria = StopCriteria(eos_ids=frozenset([2]))
        >>> criteria.find_end([5, 2, 7], num_checked=0, max_new_tokens=9)
        2
        """
        for i in range(num_checked, min(len(ids), max_new_tokens)):
            if ids[i] in self.eos_ids:
                return self._find_stop_string_end(ids[: i + 1], num_checked) or i + 1
        return self._find_stop_string_end(ids[:max_new_tokens], num_checked) or (
            max_new_tokens if len(ids) >= max_new_tokens else None
        )

    def _find_stop_string_end(self, ids: list[int], num_checked: int) -> int | None:
        """Return the number of tokens up to the first that completes a stop string, or None."""
        if not self.stop_strings or self.detokenize is None or not self._has_stop_string(ids):
            return None
        return next(
            i for i in range(num_checked + 1, len(ids) + 1) if self._has_stop_string(ids[:i])
        )

    def _has_stop_string(self, ids: list[int]) -> bool:
        assert self.detokenize is not None
        text = self.detokenize(ids)
        return any(string in text for string in self.stop_strings)
