"""The manifest of a mixture: its sources, how much each gives, what is left out of all.

    sources:    {chat: {path, share: 0.7, licence, ...}, code: {path, share: 0.3, ...}}
    rows: 1000  -> 700 rows of chat, 300 of code        rows: null -> as many as the shares allow

Rows stand in the order of a hash of what they ask, and a share is taken from the front: which rows
of a source come first does not depend on other sources.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from models.errors import UserError

CONTENT = (
    "messages", "conversations", "data", "ids", "text", "prompt", "instruction", "input",
    "question", "turns", "answer", "output", "response", "completion", "solution",
)  # fmt: skip
LABELS = ("id", "category", "language", "licence", "tools", "template", "system")


@dataclass(kw_only=True)
class SourceConf:
    """One source of rows, and what is said of them."""

    path: str  # hub name, saved directory, file, directory of files, or `demo`
    subset: str | None = None  # the dataset's configuration
    split: str = "train"
    revision: str | None = None  # of the hub's repository
    columns: dict[str, str] = field(default_factory=dict)  # ours: theirs, where not recognised
    share: float | None = None  # weight among the sources; None for all = everything
    limit: int | None = None  # rows to read; None = all
    licence: str = ""  # like the next two: of rows that do not say it themselves
    category: str = ""
    language: str = ""
    # arguments of the chat template; of a list, each row takes one value, by its hash
    template: dict[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Raises UserError for what cannot work; `key` is where the source stands."""
        if not self.path:
            raise UserError(f"{key}.path: must name a file, a directory or a data set, got ''")
        known = ", ".join((*CONTENT, *LABELS))
        if unknown := sorted(set(self.columns) - {*CONTENT, *LABELS}):
            raise UserError(
                f"{key}.columns: must map names of ours to columns of the data, "
                f"got {unknown[0]}; ours are {known}"
            )
        if self.share is not None and not 0 < self.share < math.inf:
            raise UserError(
                f"{key}.share: must be a number above 0, got {self.share}; remove the source"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"{key}.limit: must be at least 1 or null, got {self.limit}")
        if empty := [name for name, value in self.template.items() if value == []]:
            raise UserError(f"{key}.template.{empty[0]}: must list a value at least, got []")


@dataclass(kw_only=True)
class MixtureConf:
    """What goes into a prepared folder."""

    sources: dict[str, SourceConf] = field(default_factory=dict)
    rows: int | None = None  # in all, held-out ones too; None: the most that the shares allow
    exclude: list[str] = field(default_factory=lambda: ["demo"])  # prompt files, held out elsewhere
    held_out: float = 0.01  # share of the first prompts, by their hash
    min_chars: int = 1  # of a row
    max_chars: int | None = 200_000
    max_prompt_tokens: int | None = None  # of a first prompt; None: what the target can read

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("mixture.sources: must name a source, got none; see docs/prepare.md")
        for name, source in self.sources.items():
            source.check(f"mixture.sources.{name}")
        with_share = [name for name, source in self.sources.items() if source.share is not None]
        if with_share and len(with_share) < len(self.sources):
            missing = next(name for name in self.sources if name not in with_share)
            raise UserError(
                f"mixture.sources.{missing}.share: must be set for all sources or none, got null"
            )
        if self.rows is not None and (self.rows < 1 or not with_share):
            raise UserError(
                f"mixture.rows: must be at least 1 of sources with shares, got {self.rows}; "
                "give each source a share, or set rows=null"
            )
        if not 0 <= self.held_out < 1:
            raise UserError(
                f"mixture.held_out: must be at least 0 and below 1, got {self.held_out}"
            )
        limits = {"max_chars": self.max_chars, "max_prompt_tokens": self.max_prompt_tokens}
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise UserError(f"mixture.{name}: must be at least 1 or null, got {limit}")
        if self.max_chars is not None and self.min_chars > self.max_chars:
            raise UserError(
                f"mixture.min_chars: must be at most max_chars={self.max_chars}, "
                f"got {self.min_chars}"
            )


def quotas(available: dict[str, int], conf: MixtureConf) -> dict[str, int]:
    """Rows that each source gives. Raises UserError where one has too few for its share."""
    shares = {name: Fraction(str(s.share)) for name, s in conf.sources.items() if s.share}
    if not shares:
        return available
    if none := [name for name in shares if not available[name]]:
        raise UserError(
            f"mixture.sources.{none[0]}: must have rows that no source before it has, got "
            "duplicates alone; remove the source"
        )
    total = sum(shares.values())
    shares = {name: share / total for name, share in shares.items()}
    most = min(int(available[name] / share) for name, share in shares.items())
    while any(n > available[name] for name, n in _apportioned(shares, most).items()):
        most -= 1  # a fraction of a row was rounded up
    if conf.rows is None or conf.rows <= most:
        return _apportioned(shares, most if conf.rows is None else conf.rows)
    wanted = _apportioned(shares, conf.rows)
    name = next(name for name, share in shares.items() if wanted[name] > available[name])
    raise UserError(
        f"mixture.rows: {name} must give {wanted[name]:,} of {conf.rows:,} rows, got "
        f"{available[name]:,} that can be used; set mixture.rows={most} or null, or change shares"
    )


def _apportioned(shares: dict[str, Fraction], rows: int) -> dict[str, int]:
    """Whole rows, as near to the shares as can be (largest remainder)."""
    exact = {name: share * rows for name, share in shares.items()}
    given = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: given[name] - exact[name])
    for name in by_rest[: rows - sum(given.values())]:
        given[name] += 1
    return given


@dataclass(kw_only=True)
class Chosen:
    """Which of all gathered rows are taken, in the order in which they are kept."""

    rows: Int[np.ndarray, " chosen"]
    dropped: dict[str, Counter[str]]  # by source and reason


def choose(
    signs: UInt64[np.ndarray, " rows"], source: Int[np.ndarray, " rows"], conf: MixtureConf
) -> Chosen:
    """Each sign once, of each source its share. `source` is its place in the manifest."""
    names = list(conf.sources)
    # of equal signs the first, in the order of the signs: they are hashes
    _, firsts = np.unique(signs, return_index=True)
    there = np.bincount(source, minlength=len(names)).tolist()
    new = [firsts[source[firsts] == number] for number in range(len(names))]
    wanted = quotas({name: len(rows) for name, rows in zip(names, new, strict=True)}, conf)
    taken = np.zeros(len(signs), bool)
    dropped = {}
    for name, rows, count in zip(names, new, there, strict=True):
        taken[rows[: wanted[name]]] = True
        dropped[name] = +Counter(  # those that there are
            {"a duplicate": count - len(rows), "beyond its share": len(rows) - wanted[name]}
        )
    return Chosen(rows=firsts[taken[firsts]], dropped=dropped)
