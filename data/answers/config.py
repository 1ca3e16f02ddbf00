"""Who answers the prompts of `data.prepare`, and how answers are drawn."""

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from models.errors import UserError
from models.secrets import find_secrets, redact
from models.speculate.sampling import SamplingConf

NO_KEY = "none"  # sent where the variable is not set: the client insists on one
WAVES = 4  # batches in flight: what waits is answered with prompts of like length


class By(Enum):
    """Whose answers a prepared row holds."""

    none = "none"  # those of the data
    target = "target"  # the target's, in this process
    endpoint = "endpoint"  # the target's, of a server that speaks OpenAI's protocol


@dataclass(kw_only=True)
class AnswersConf:
    """Answers by the target: sampling, and what the way to it needs."""

    by: By = By.target
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # of an answer: made of this, the row's id and the turn
    max_new_tokens: int = 1024
    context: int | None = None  # tokens of a prompt with its answer; None: all that the target has
    skip_failed: bool = False  # leave out what could not be answered, instead of asking for it
    batch: int = 32  # by=target: rows decoded together
    url: str | None = None  # by=endpoint, like all below
    model: str | None = None  # as the endpoint calls it; None: the target's name or path
    key_env: str = "OPENAI_API_KEY"  # the variable that holds the key, where one is needed
    concurrency: int = 64  # requests at a time
    retries: int = 14  # of a request, 0.5 to 8 s apart: a server may be gone for a minute
    timeout_s: float = 600.0  # of a request
    extra: dict[str, Any] = field(default_factory=dict)  # fields of a request beyond OpenAI's

    def __post_init__(self) -> None:
        SamplingConf(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        least = {"max_new_tokens": 1, "batch": 1, "concurrency": 1, "retries": 0, "context": 2}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"answers.{name}: must be at least {low}, got {value}")
        if self.timeout_s <= 0:
            raise UserError(f"answers.timeout_s: must be above 0, got {self.timeout_s}")
        if self.by is By.endpoint and not _is_address(self.url):
            raise UserError(
                "answers.url: must be an address for answers=endpoint, such as "
                f"http://localhost:8000/v1, got {redact(self.url or 'null')}; give what the server "
                "prints"
            )
        self._refuse_secrets()
        if self.by is By.endpoint and not (self.key.isascii() and self.key.isprintable()):
            raise UserError(
                f"answers.key_env: must name a variable with a key that HTTP can carry, got "
                f"characters in {self.key_env} beyond printable ASCII; set it again"
            )
        if self.context is not None:
            self.room(self.context)

    def _refuse_secrets(self) -> None:
        """config.yaml keeps every setting, and errors and logs name the address."""
        remedy = f"the key of a server belongs into the variable {self.key_env} (answers.key_env)"
        parts = urlsplit(self.url or "")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise UserError(
                "answers.url: must be an address without user, password and query, got "
                f"{redact(parts._replace(query='', fragment='').geturl())} with them; {remedy}"
            )
        for key in find_secrets(self.extra, "answers.extra"):
            raise UserError(f"{key}: must not be a secret, got what looks like one; {remedy}")

    @property
    def sampling(self) -> SamplingConf:
        return SamplingConf(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )

    def room(self, *contexts: int | None) -> int:
        """Tokens that a prompt may have, in the least of the contexts that are known."""
        known = [tokens for tokens in (self.context, *contexts) if tokens is not None]
        if not known:
            raise UserError(
                "answers.context: must be set for a target that does not say its own, got null"
            )
        if min(known) <= self.max_new_tokens:
            raise UserError(
                f"answers.max_new_tokens: must leave room for a prompt in a context of "
                f"{min(known)} tokens, got {self.max_new_tokens}; lower it"
            )
        return min(known) - self.max_new_tokens

    @property
    def rows_at_once(self) -> int:
        """Rows in flight; each waits for one answer at a time."""
        return self.concurrency if self.by is By.endpoint else self.batch * WAVES

    @property
    def key(self) -> str:
        return os.environ.get(self.key_env, "").strip() or NO_KEY


def _is_address(url: str | None) -> bool:
    try:
        parts = urlsplit(url or "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port is called so
        return False
