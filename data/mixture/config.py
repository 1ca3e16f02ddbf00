"""The manifest of a mixture: its sources, their shares, and the filters for every source.

sources:    {chat: {path, share: 0.7, license, ...}, code: {path, share: 0.3, ...}}
rows: 1000  -> 700 rows of chat, 300 of code        rows: null -> as many as the shares allow

data/mixture/select.py takes the shares.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from data.answers.config import AnswersConf, AnswerSource
from data.config import CONTENT_COLUMNS
from models.device.config import DeviceConf
from models.errors import UserError, require
from models.target.config import TargetConf
from models.tracking import TrackerConf
from models.validation import BELOW_ONE, Rule, at_least, check_values, unused

LABEL_COLUMNS = ("id", "category", "language", "license", "tools", "template", "system")


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
    # `license`, `category` and `language` are defaults for rows without their own
    license: str = ""
    category: str = ""
    language: str = ""
    # arguments of the chat template; each row picks one value of a list by its hash
    template: dict[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Check the settings; raise UserError otherwise. `key` is the source's config key."""
        require(bool(self.path), f"{key}.path: must name a file, a directory or a dataset, got ''")
        known_names = (*CONTENT_COLUMNS, *LABEL_COLUMNS)
        if unknown := sorted(set(self.columns).difference(known_names)):
            raise UserError(
                f"{key}.columns: must map known names to columns of the data, "
                f"got {unknown[0]}; known names are {', '.join(known_names)}"
            )
        check_values(
            self, key,
            share=Rule(
                "must be a positive number", lambda share: 0 < share < math.inf, "remove the source"
            ),
            limit=at_least(1, "null reads all rows"),
        )  # fmt: skip
        for name, value in self.template.items():
            require(value != [], f"{key}.template.{name}: must list at least one value, got []")


@dataclass(kw_only=True)
class MixtureConf:
    """The sources of a prepared folder, its size and its filters."""

    sources: dict[str, SourceConf] = field(default_factory=dict)
    rows: int | None = None  # total, held-out rows included; None: the most that the shares allow
    exclude: list[str] = field(default_factory=lambda: ["demo"])  # prompt files held out elsewhere
    held_out: float = 0.01  # share of the first prompts, chosen by their hash
    min_chars: int = 1  # characters of a row
    max_chars: int | None = 200_000
    max_prompt_tokens: int | None = None  # tokens of a first prompt; None: the target's limit

    def __post_init__(self) -> None:
        require(
            bool(self.sources),
            "mixture.sources: must name at least one source, got none; see docs/prepare.md",
        )
        for name, source in self.sources.items():
            source.check(f"mixture.sources.{name}")
        unshared = [name for name, source in self.sources.items() if source.share is None]
        if 0 < len(unshared) < len(self.sources):
            raise UserError(
                f"mixture.sources.{unshared[0]}.share: must be set for all sources or none, got "
                "null"
            )
        check_values(
            self, "mixture",
            rows=Rule(
                "must be at least 1 and needs sources with shares",
                lambda rows: rows >= 1 and not unshared,
                "give each source a share, or set rows=null",
            ),
            held_out=BELOW_ONE,
            max_chars=at_least(1, "null sets no limit"),
            max_prompt_tokens=at_least(1, "null takes the target's limit"),
            min_chars=Rule(
                f"must be at most max_chars={self.max_chars}",
                lambda chars: self.max_chars is None or chars <= self.max_chars,
            ),
        )  # fmt: skip


@dataclass(kw_only=True)
class PrepareConf:
    """Settings of `data.prepare`."""

    mixture: MixtureConf
    # A target without a name or path becomes None: prompts are then measured in characters only.
    target: TargetConf | None = field(default_factory=lambda: TargetConf(name=""))
    answers: AnswersConf = field(default_factory=AnswersConf)
    # for answers.source=target
    device: DeviceConf = field(default_factory=DeviceConf, metadata=unused("memory_gib"))
    log: TrackerConf = field(default_factory=TrackerConf)
    worker: int = 0  # this worker's number, in 0..workers - 1
    workers: int = 1  # each takes a share of the rows and writes its own files
    run_name: str = "demo"
    output_dir: str = "outputs/prepare"

    def __post_init__(self) -> None:
        if self.target is not None and not self.target.name:
            path = self.target.path
            self.target = replace(self.target, name=path) if path is not None else None
        require(
            0 <= self.worker < self.workers,
            f"worker: must lie in 0..{self.workers - 1} of workers={self.workers}, "
            f"got {self.worker}",
        )
        require(
            self.target is not None or self.mixture.max_prompt_tokens is None,
            "mixture.max_prompt_tokens: must be null without a target, got "
            f"{self.mixture.max_prompt_tokens}; choose one by target=NAME",
        )
        require(
            self.target is not None or self.answers.source is AnswerSource.none,
            f"target: must be chosen for answers={self.answers.source.value}, got none; "
            "add target=NAME, or answers=none to keep the data's own answers",
        )
