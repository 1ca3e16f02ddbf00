"""The target behind an HTTP server: any that speaks OpenAI's `/v1/completions`.

Prompts are sent as token ids, rendered here from the target's own chat template, so that neither
the server's template nor its parsers come between. vLLM and SGLang return ids too
(`return_token_ids`); the text of other servers is split anew, and the answer marked `retokenised`.
The client retries what may pass (408, 409, 429, 5xx, timeouts, lost connections), waiting longer
each time. So do we where a reply holds no answer: servers that stop end what they have at work as
`abort`, with status 200, and proxies send pages of their own.
"""

import asyncio
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import openai

from data.answers.config import NO_KEY, AnswersConf
from data.answers.dialogue import Answer, UnansweredError
from models.errors import UserError
from models.target.target import TargetConf

log = logging.getLogger(__name__)
CONNECT_S = 10.0  # a host that is gone never answers
QUICK = {"max_retries": 2, "timeout": CONNECT_S}  # for the first question: is anybody there?
FIRST_S, LONGEST_S = 0.5, 8.0  # between requests without an answer, as the client has it


@dataclass(kw_only=True, frozen=True)
class Served:
    """What an endpoint says of the model that it serves."""

    model: str
    context: int | None  # tokens, where it says so


class NoAnswerError(Exception):
    """A reply with status 200 that holds no answer. `str(error)` says what it holds."""


def check(conf: AnswersConf, target: TargetConf) -> Served:
    """Whether the endpoint is there and serves the target. Raises UserError; loads nothing."""
    client = openai.OpenAI(base_url=conf.url, api_key=conf.key)
    try:
        cards = _cards(client.with_options(**QUICK).models.with_raw_response.list())
    except (openai.OpenAIError, NoAnswerError) as error:
        raise UserError(
            f"answers.url: must be an endpoint that can be reached, got {conf.url} "
            f"({_reason(error)}); start the server, or mend the url (it ends in /v1) or "
            f"the key in ${conf.key_env}"
        ) from error
    names = {conf.model} if conf.model else {target.name, target.path or target.name}
    card = next((card for card in cards if {card["id"], card.get("root")} & names), None)
    if card is None:
        raise UserError(
            f"answers.model: must be served by {conf.url}, got "
            f"{' or '.join(sorted(names))} where it serves "
            f"{', '.join(card['id'] for card in cards) or 'none'}; start the target there, or name "
            "it as the server does"
        )
    # of an adapter the context is its base's, which alone says it
    base = next((base for base in cards if base["id"] == card.get("parent")), card)
    served = Served(model=card["id"], context=base.get("max_model_len"))
    _check_room(conf, served)
    _check_answer(conf, served, client)
    return served


def _check_room(conf: AnswersConf, served: Served) -> None:
    needed = conf.context or conf.max_new_tokens + 1
    if served.context is not None and served.context < needed:
        key = "context" if conf.context else "max_new_tokens"
        raise UserError(
            f"answers.{key}: must fit into the {served.context} tokens that {conf.url} serves, got "
            f"{getattr(conf, key)}; lower it, or raise the server's --max-model-len"
        )


def _check_answer(conf: AnswersConf, served: Served, client: openai.OpenAI) -> None:
    """One token, asked for as all are: are ids taken, and do ids come back?"""
    patient = client.with_options(max_retries=conf.retries, timeout=_timeout(conf))
    asked = _request(conf, served.model, [1], key=0, most=1)
    try:
        choice = _choice(patient.completions.with_raw_response.create(**asked))
    except (openai.OpenAIError, NoAnswerError) as error:
        raise UserError(
            f"answers.url: must complete token ids, got {shorten(_text(error, conf), 200)} from "
            f"{conf.url}; see that it serves /v1/completions, and leave out a field that it "
            "refuses by ~answers.extra.FIELD"
        ) from error
    if choice.get("token_ids") is None:
        log.warning("answers: %s gives no token ids: its text is split into tokens anew", conf.url)


class Endpoint:
    """An Asker: one request an answer."""

    def __init__(self, conf: AnswersConf, served: Served, target: TargetConf, tokenizer: Any):
        self.conf, self.model, self.tokenizer = conf, served.model, tokenizer
        # one less: SGLang refuses what would fill its context
        self.room = conf.room(served.context, target.source.context()) - 1
        self.eos_ids = target.source.eos_ids()
        self.end = end_of_turn(tokenizer, self.eos_ids)
        self.client = openai.AsyncOpenAI(
            base_url=conf.url, api_key=conf.key, max_retries=conf.retries, timeout=_timeout(conf)
        )

    async def ask(self, ids: list[int], *, key: int) -> Answer:
        asked = _request(self.conf, self.model, ids, key=key, most=self.conf.max_new_tokens)
        waits_s = (min(FIRST_S * 2.0**n, LONGEST_S) for n in range(self.conf.retries))
        while True:
            try:
                reply = await self.client.completions.with_raw_response.create(**asked)
                return self._answer(_choice(reply))
            except openai.OpenAIError as error:
                raise UnansweredError(_reason(error), _text(error, self.conf)) from error
            except NoAnswerError as error:
                if (wait_s := next(waits_s, None)) is None:
                    raise UnansweredError(str(error)) from error
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        await self.client.close()

    def _answer(self, choice: dict[str, Any]) -> Answer:
        given, reason = choice.get("token_ids"), choice["finish_reason"]
        ids = given
        if ids is None:
            text = choice["text"]
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if reason == "stop" and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.end]
        return Answer(ids=ids, finish_reason=reason, retokenised=given is None)


def end_of_turn(tokenizer: Any, eos_ids: Collection[int]) -> int:
    """The token that ends an answer: of those that may, the one that the chat template writes."""
    if tokenizer.chat_template is not None:
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        rendered = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
        written = [token for token in rendered if token in eos_ids]
        if written:
            return written[-1]
    return tokenizer.eos_token_id


def _request(
    conf: AnswersConf, model: str, ids: list[int], *, key: int, most: int
) -> dict[str, Any]:
    return {
        "model": model, "prompt": ids, "max_tokens": most, "seed": key,
        "temperature": conf.temperature, "top_p": conf.top_p,
        "extra_body": {"top_k": conf.top_k or -1, **conf.extra},
    }  # fmt: skip


def _timeout(conf: AnswersConf) -> openai.Timeout:
    return openai.Timeout(conf.timeout_s, connect=min(conf.timeout_s, CONNECT_S))


def _cards(reply: Any) -> list[dict[str, Any]]:
    """The models of a reply. Raises NoAnswerError."""
    try:
        cards = json.loads(reply.content)["data"]
        return [card for card in cards if card["id"]]
    except (ValueError, LookupError, TypeError) as error:
        raise NoAnswerError("no list of models") from error


def _choice(reply: Any) -> dict[str, Any]:
    """The answer of a reply. Raises NoAnswerError."""
    try:
        choice = json.loads(reply.content)["choices"][0]
        reason, _ = choice["finish_reason"], choice["text"]
    except (ValueError, LookupError, TypeError) as error:
        raise NoAnswerError("no completion") from error
    if reason not in ("stop", "length"):
        raise NoAnswerError(f"finish_reason {reason}")
    return choice


def _text(error: Exception, conf: AnswersConf) -> str:
    """Remove the key from a server's message: some servers repeat the key that they refuse."""
    return str(error).replace(conf.key, "***") if conf.key != NO_KEY else str(error)


def _reason(error: Exception) -> str:
    """A few words that like failures share."""
    match error:
        case openai.APITimeoutError():
            return "timeout"
        case openai.APIConnectionError():
            return "no connection"
        case openai.APIStatusError(status_code=status):
            return f"status {status}"
    return str(error)
