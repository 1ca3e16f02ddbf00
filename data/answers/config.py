"""Settings of the answers in `data.prepare`: their source, and how they are sampled."""

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from models.errors import UserError, require
from models.secrets import find_secrets, redact
from models.speculate.config import SAMPLING_RULES, SamplingConf
from models.validation import POSITIVE, SEED, at_least, check_values

NO_API_KEY = "none"  # sent if the variable is not set, because the client requires a key
BATCHES_IN_FLIGHT = 16  # waiting prompts are batched by similar length


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
            self, "answers", temperature=SAMPLING_RULES["temperature"],
            top_p=SAMPLING_RULES["top_p"], top_k=SAMPLING_RULES["top_k"], seed=SEED,
            max_new_tokens=at_least(1), batch=at_least(1), concurrency=at_least(1),
            retries=at_least(0), context=at_least(2), timeout_s=POSITIVE,
        )  # fmt: skip
        is_endpoint = self.source is AnswerSource.endpoint
        require(
            not (is_endpoint or self.url) or _is_http_url(self.url),
            "answers.url: must be an address for answers=endpoint, such as "
            f"http://localhost:8000/v1, got {redact(self.url or 'null')}; give the address "
            "that the server prints",
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
        return SamplingConf(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )

    def prompt_limit(self, *contexts: int | None) -> int:
        """Return the maximum number of prompt tokens in the smallest known context.

        Raises UserError if no context is known, or if it leaves no room for a prompt.
        """
        limits = [tokens for tokens in (self.context, *contexts) if tokens is not None]
        require(
            bool(limits),
            "answers.context: must be set for a target without a known context length, got null; "
            "give the tokens that a prompt and its answer may take together",
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
        return (
            self.concurrency
            if self.source is AnswerSource.endpoint
            else self.batch * BATCHES_IN_FLIGHT
        )

    @property
    def api_key(self) -> str:
        """Return the API key from the environment, or `NO_API_KEY`."""
        return os.environ.get(self.api_key_env, "").strip() or NO_API_KEY


def _is_http_url(url: str | None) -> bool:
    try:
        parts = urlsplit(url or "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a valid port
        return False
