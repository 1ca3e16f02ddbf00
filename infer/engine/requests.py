"""A request of a batch: its prompt, its answer so far, and what each round contributed."""

from dataclasses import dataclass, field

from infer.engine.stopping import StopCriteria


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
        end = criteria.find_end(
            ids, num_checked=len(ids) - num_new, max_new_tokens=self.max_new_tokens
        )
        self.generation.ids = ids[:end]  # all of them if `end` is None
        self.finished = end is not None
