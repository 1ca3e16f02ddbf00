"""Configuration of `data.prepare`: the sources of a mixture, the answers, and the command."""

import math
import os
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from data.config import CONTENT_COLUMNS, MISSING
from models.device.config import DeviceConf
from models.io.errors import BELOW_ONE, POSITIVE, Rule, UserError, at_least, check_values, require, unused
from models.io.secrets import find_secrets, redact
from models.io.tracking import TrackerConf
from models.parallel.config import TensorConf
from models.targets.config import TargetConf
from models.trees.sampling_config import SAMPLING_RULES, SamplingConf

LABEL_COLUMNS = ("id", "category", "language", "license", "tools", "template", "system")
NO_API_KEY = "none"  # sent if the variable is not set, because the client requires a key
BATCHES_IN_FLIGHT = 16  # waiting prompts are batched by similar length


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
            self,
            key,
            share=Rule("must be a positive number", lambda share: 0 < share < math.inf, "remove the source"),
            limit=at_least(1, "null reads all rows"),
        )
        for name, value in self.template.items():
            require(value != [], f"{key}.template.{name}: must list at least one value, got []")


@dataclass(kw_only=True)
class MixtureConf:
    """The sources of a prepared folder, its size and its filters."""

    sources: dict[str, SourceConf] = field(default_factory=dict)
    rows: int | None = None  # total, held-out rows included; None: the most that the shares allow
    exclude: list[str] = field(default_factory=lambda: ["demo"])  # prompt files held out elsewhere
    held_out: float = 0.01  # share of the first prompts, chosen by their hash
    max_chars: int | None = 200_000  # of a row, before tokenization
    max_prompt_tokens: int | None = None  # tokens of a first prompt; None: the target's limit

    def __post_init__(self) -> None:
        require(bool(self.sources), "mixture.sources: must name at least one source, got none; see docs/prepare.md")
        for name, source in self.sources.items():
            source.check(f"mixture.sources.{name}")
        unshared = [name for name, source in self.sources.items() if source.share is None]
        if 0 < len(unshared) < len(self.sources):
            raise UserError(f"mixture.sources.{unshared[0]}.share: must be set for all sources or none, got null")
        check_values(
            self,
            "mixture",
            rows=Rule(
                "must be at least 1 and needs sources with shares",
                lambda rows: rows >= 1 and not unshared,
                "give each source a share, or set rows=null",
            ),
            held_out=BELOW_ONE,
            max_chars=at_least(1, "null sets no limit"),
            max_prompt_tokens=at_least(1, "null takes the target's limit"),
        )


class AnswerSource(Enum):
    """The source of the answers in prepared rows."""

    none = "none"  # the data's own answers
    target = "target"  # the target in this process
    endpoint = "endpoint"  # the target behind a server with OpenAI's API


@dataclass(kw_only=True)
class AnswersConf:
    """Settings of the target's answers: sampling, and the backend that generates them."""

    source: AnswerSource = AnswerSource.target
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # hashed with a row's id and the turn into the seed of each answer
    max_new_tokens: int = 1024
    context: int | None = None  # tokens of a prompt and its answer; None: the target's limit
    skip_failed: bool = False  # leave out rows that failed permanently instead of raising
    batch: int = 32  # source=target: rows decoded together
    # the fields below are for source=endpoint
    url: str | None = None
    model: str | None = None  # the endpoint's name of the model; None: the target's name or path
    api_key_env: str = "OPENAI_API_KEY"  # environment variable with the API key, if one is needed
    concurrency: int = 64  # requests in flight
    retries: int = 14  # of a request, 0.5 to 8 s apart: a server may be down for a minute
    timeout_s: float = 600.0  # for a request
    extra_body: dict[str, Any] = field(default_factory=dict)  # request fields beyond OpenAI's

    def __post_init__(self) -> None:
        check_values(
            self,
            "answers",
            **{name: SAMPLING_RULES[name] for name in ("temperature", "top_p", "top_k", "seed")},
            max_new_tokens=at_least(1),
            batch=at_least(1),
            concurrency=at_least(1),
            retries=at_least(0),
            context=at_least(2),
            timeout_s=POSITIVE,
        )
        is_endpoint = self.source is AnswerSource.endpoint
        require(
            not (is_endpoint or self.url) or _is_http_url(self.url),
            "answers.url: must be an address for answers=endpoint, such as http://localhost:8000/v1, got "
            f"{redact(self.url or 'null')}; give the address that the server prints",
        )
        require(
            not is_endpoint or (self.api_key.isascii() and self.api_key.isprintable()),
            f"answers.api_key_env: must name a variable with a key that HTTP can carry, got "
            f"characters in {self.api_key_env} beyond printable ASCII; set it again",
        )
        if self.context is not None:
            self.prompt_limit(self.context)
        # Secrets are rejected: config.yaml stores settings, and errors and logs show the URL.
        remedy = f"put the server's key into the variable {self.api_key_env} (answers.api_key_env)"
        parts = urlsplit(self.url or "")
        require(
            not ("@" in parts.netloc or parts.query or parts.fragment),
            "answers.url: must be an address without user, password and query, got "
            f"{redact(parts._replace(query='', fragment='').geturl())} with them; {remedy}",
        )
        for key in find_secrets(self.extra_body, "answers.extra_body"):
            raise UserError(f"{key}: must not be a secret, got what looks like one; {remedy}")

    @property
    def sampling(self) -> SamplingConf:
        """Return the sampling settings."""
        return SamplingConf(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)

    def prompt_limit(self, *contexts: int | None) -> int:
        """Return the most tokens of a prompt in the smallest known context; raise UserError if that leaves none."""
        limits = [tokens for tokens in (self.context, *contexts) if tokens is not None]
        require(
            bool(limits),
            "answers.context: must be set for a target of unknown context, got null; give that of prompt and answer",
        )
        require(
            min(limits) > self.max_new_tokens,
            f"answers.max_new_tokens: must leave room for a prompt in a context of "
            f"{min(limits)} tokens, got {self.max_new_tokens}; lower it",
        )
        return min(limits) - self.max_new_tokens

    @property
    def rows_in_flight(self) -> int:
        """Return the number of rows in flight; each waits for one answer at a time."""
        return self.concurrency if self.source is AnswerSource.endpoint else self.batch * BATCHES_IN_FLIGHT

    @property
    def api_key(self) -> str:
        """Return the API key from the environment, or `NO_API_KEY`."""
        return os.environ.get(self.api_key_env, "").strip() or NO_API_KEY


@dataclass(kw_only=True)
class PrepareConf:
    """Settings of `data.prepare`."""

    mixture: MixtureConf
    # without a name or path there is no target: prompts are then measured in characters only
    target: TargetConf = field(default_factory=lambda: TargetConf(name=""))
    answers: AnswersConf = field(default_factory=AnswersConf)
    # for answers.source=target; compiling pays off on an accelerator from thousands of rows
    device: DeviceConf = field(default_factory=lambda: DeviceConf(compile=False), metadata=unused("memory_gib"))
    parallel: TensorConf = field(default_factory=TensorConf)  # for answers.source=target
    log: TrackerConf = field(default_factory=TrackerConf)
    worker: int = 0  # this worker's number, in 0..workers - 1
    workers: int = 1  # each answers a share of the rows and writes its own file
    run_name: str = MISSING
    output_dir: str = "outputs/prepare"

    def __post_init__(self) -> None:
        if self.target.path is not None and not self.target.name:
            self.target = replace(self.target, name=self.target.path)
        require(
            0 <= self.worker < self.workers,
            f"worker: must lie in 0..{self.workers - 1} of workers={self.workers}, got {self.worker}",
        )
        require(
            self.has_target or self.mixture.max_prompt_tokens is None,
            f"mixture.max_prompt_tokens: must be null without a target, got {self.mixture.max_prompt_tokens}; add one",
        )
        require(
            self.has_target or self.answers.source is AnswerSource.none,
            f"target: must be set for answers={self.answers.source.value}, got none; add target=NAME or answers=none",
        )
        require(
            self.parallel.tensor == 1 or self.answers.source is AnswerSource.target,
            f"parallel.tensor: must be 1 for answers={self.answers.source.value}, which loads no target, "
            f"got {self.parallel.tensor}; leave it out",
        )

    @property
    def has_target(self) -> bool:
        return bool(self.target.location)


def _is_http_url(url: str | None) -> bool:
    try:
        parts = urlsplit(url or "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a valid port
        return False
