"""A request: its prompt, its answer so far, what each round contributed, and where it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Generation:
    """One row's answer, and what each round contributed to it.

    The first token comes from the prefill. `ids` is truncated at the end of the answer. `accepted`
    is not: it counts everything that verification accepted, even past the end.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # draft tokens accepted in each round
    drafted: list[int] = field(default_factory=list)  # nodes proposed in each round
    prefill_s: float = 0.0  # until the first token is on the host
    round_s: list[float] = field(default_factory=list)
    share_s: list[float] = field(default_factory=list)  # round_s / active rows

    def add_round(self, ids: list[int], *, drafted: int, round_s: float, active_rows: int) -> None:
        """Append the tokens of a round that `active_rows` rows shared."""
        self.ids += ids
        self.accepted.append(len(ids) - 1)  # the last token is the target's own
        self.drafted.append(drafted)
        self.round_s.append(round_s)
        self.share_s.append(round_s / active_rows)

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def decoded_tokens(self) -> int:
        """Return the number of tokens that rounds added to the answer: all but the prefill's."""
        return len(self.ids) - 1


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # in place of bytes that are no character


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
        unchecked = range(num_checked, min(len(ids), max_new_tokens))
        limit = next((i + 1 for i in unchecked if ids[i] in self.eos_ids), max_new_tokens)
        stop_string_end = self._find_stop_string_end(ids[:limit], num_checked)
        return stop_string_end or (limit if len(ids) >= limit else None)

    def _find_stop_string_end(self, ids: list[int], num_checked: int) -> int | None:
        """Return the number of tokens up to the first that completes a stop string, or None.

        Bytes that are no character yet can hide the text before them: byte-fallback tokenizers decode the whole run of
        bytes, a line break included, as replacement characters. Only a text without any is looked at once.
        """
        if not self.stop_strings or self.detokenize is None:
            return None
        text = self.detokenize(ids)
        if REPLACEMENT not in text and not self._has_stop_string(text):
            return None
        lengths = range(num_checked + 1, len(ids) + 1)
        return next((n for n in lengths if self._has_stop_string(self.detokenize(ids[:n]))), None)

    def _has_stop_string(self, text: str) -> bool:
        return any(string in text for string in self.stop_strings)


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt and its answer so far."""

    ids: list[int]
    row_id: int  # keys the noise
    max_new_tokens: int
    generation: Generation = field(default_factory=Generation)
    finished: bool = False

    def truncate_if_finished(self, criteria: StopCriteria, *, num_new: int) -> None:
        """Cut the answer and finish the request if the last `num_new` tokens end it."""
        ids = self.generation.ids
        end = criteria.find_end(ids, num_checked=len(ids) - num_new, max_new_tokens=self.max_new_tokens)
        self.generation.ids = ids[:end]  # all of them if `end` is None
        self.finished = end is not None
