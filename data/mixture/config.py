"""The manifest of a mixture: its sources, their shares, and the filters for every source.

    sources:    {chat: {path, share: 0.7, licence, ...}, code: {path, share: 0.3, ...}}
    rows: 1000  -> 700 rows of chat, 300 of code        rows: null -> as many as the shares allow

The rows of a source are ordered by a hash of their questions, and a share is taken from the front.
The order within a source therefore does not depend on the other sources.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from models.errors import UserError

CONTENT_COLUMNS = (
    "messages", "conversations", "data", "ids", "text", "prompt", "instruction", "input",
    "question", "turns", "answer", "output", "response", "completion", "solution",
)  # fmt: skip
LABEL_COLUMNS = ("id", "category", "language", "licence", "tools", "template", "system")


@dataclass(kw_only=True)
class SourceConf:
    """One source of rows, and the labels of its rows."""

    path: str  # hub name, saved directory, file, directory of files, or `demo`
    subset: str | None = None  # configuration of the dataset
    split: str = "train"
    revision: str | None = None  # of the Hugging Face repository
    columns: dict[str, str] = field(default_factory=dict)  # our name: its column, if not recognized
    share: float | None = None  # weight among the sources; None for all: every row
    limit: int | None = None  # rows to read; None: all
    # `licence`, `category` and `language` are defaults for rows without their own
    licence: str = ""
    category: str = ""
    language: str = ""
    # arguments of the chat template; each row picks one value of a list by its hash
    template: dict[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Check the settings; raise UserError otherwise. `key` is the source's config key."""
        if not self.path:
            raise UserError(f"{key}.path: must name a file, a directory or a dataset, got ''")
        known_names = ", ".join((*CONTENT_COLUMNS, *LABEL_COLUMNS))
        if unknown := sorted(set(self.columns) - {*CONTENT_COLUMNS, *LABEL_COLUMNS}):
            raise UserError(
                f"{key}.columns: must map known names to columns of the data, "
                f"got {unknown[0]}; known names are {known_names}"
            )
        if self.share is not None and not 0 < self.share < math.inf:
            raise UserError(
                f"{key}.share: must be a number above 0, got {self.share}; remove the source"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"{key}.limit: must be at least 1 or null, got {self.limit}")
        if empty := [name for name, value in self.template.items() if value == []]:
            raise UserError(f"{key}.template.{empty[0]}: must list at least one value, got []")


@dataclass(kw_only=True)
class MixtureConf:
    """The sources of a prepared folder, its size and its filters."""

    sources: dict[str, SourceConf] = field(default_factory=dict)
    rows: int | None = None  # total with held-out rows; None: the most that the shares allow
    exclude: list[str] = field(default_factory=lambda: ["demo"])  # prompt files held out elsewhere
    held_out: float = 0.01  # share of the first prompts, chosen by their hash
    min_chars: int = 1  # characters of a row
    max_chars: int | None = 200_000
    max_prompt_tokens: int | None = None  # tokens of a first prompt; None: the target's limit

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(
                "mixture.sources: must name at least one source, got none; see docs/prepare.md"
            )
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
                f"mixture.rows: must be at least 1 and needs sources with shares, got {self.rows}; "
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


def compute_quotas(available: dict[str, int], conf: MixtureConf) -> dict[str, int]:
    """Return the number of rows to take from each source.

    Raises UserError for a source with too few rows for its share.
    """
    shares = {name: Fraction(str(s.share)) for name, s in conf.sources.items() if s.share}
    if not shares:
        return available
    if empty := [name for name in shares if not available[name]]:
        raise UserError(
            f"mixture.sources.{empty[0]}: must have rows that no earlier source has, got "
            "only duplicates; remove the source"
        )
    total = sum(shares.values())
    shares = {name: share / total for name, share in shares.items()}
    max_rows = min(int(available[name] / share) for name, share in shares.items())
    while any(n > available[name] for name, n in _apportion_rows(shares, max_rows).items()):
        max_rows -= 1  # rounding up a fraction of a row exceeded what a source has
    if conf.rows is None or conf.rows <= max_rows:
        return _apportion_rows(shares, max_rows if conf.rows is None else conf.rows)
    quotas = _apportion_rows(shares, conf.rows)
    name = next(name for name, share in shares.items() if quotas[name] > available[name])
    raise UserError(
        f"mixture.rows: {name} must give {quotas[name]:,} of {conf.rows:,} rows, got "
        f"{available[name]:,} that can be used; set mixture.rows={max_rows} or null, or change "
        "shares"
    )


def _apportion_rows(shares: dict[str, Fraction], rows: int) -> dict[str, int]:
    """Split `rows` by the shares into whole rows (largest-remainder method)."""
    exact = {name: share * rows for name, share in shares.items()}
    quotas = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: rows - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


@dataclass(kw_only=True)
class SelectedRows:
    """The rows of the mixture, in the order in which they are written, and the drop counts."""

    rows: Int[np.ndarray, " chosen"]  # indices into the candidate rows
    dropped: dict[str, Counter[str]]  # counts by source and reason


def select_rows(
    hashes: UInt64[np.ndarray, " rows"], source: Int[np.ndarray, " rows"], conf: MixtureConf
) -> SelectedRows:
    """Drop duplicate rows and take each source's share.

    `hashes` are hashes of the rows' questions; `source` is an index into the manifest's sources.
    """
    names = list(conf.sources)
    # the first row of each hash; sorting by hash shuffles the rows reproducibly
    _, first_rows = np.unique(hashes, return_index=True)
    counts = np.bincount(source, minlength=len(names)).tolist()
    unique_rows = [first_rows[source[first_rows] == number] for number in range(len(names))]
    quotas = compute_quotas(
        {name: len(rows) for name, rows in zip(names, unique_rows, strict=True)}, conf
    )
    selected = np.zeros(len(hashes), bool)
    dropped = {}
    for name, rows, count in zip(names, unique_rows, counts, strict=True):
        selected[rows[: quotas[name]]] = True
        dropped[name] = +Counter(  # the unary plus removes zero counts
            {"a duplicate": count - len(rows), "beyond its share": len(rows) - quotas[name]}
        )
    return SelectedRows(rows=first_rows[selected[first_rows]], dropped=dropped)
