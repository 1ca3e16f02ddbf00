"""The target behind any HTTP server with OpenAI's `/v1/completions` (docs/regeneration.md).

The client retries transient errors itself; a reply without an answer is retried here, with the same delays.
"""

import asyncio
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import openai

from data.answers.dialogue import Answer, UnansweredError
from data.prepare_config import NO_API_KEY, AnswersConf
from models.io.errors import UserError, require
from models.targets.config import TargetConf
from models.targets.pretrained import read_context_length, read_eos_ids

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 10.0  # a host that is down never answers
PROBE_OPTIONS = {"max_retries": 2, "timeout": CONNECT_TIMEOUT_S}  # of the request for the models
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0  # between retries of replies without an answer


@dataclass(kw_only=True, frozen=True)
class ServedModel:
    """The name and context length under which an endpoint serves the target."""

    model: str
    context: int | None  # tokens; None if the endpoint does not report it


def check_endpoint(conf: AnswersConf, target: TargetConf) -> ServedModel:
    """Return the model under which the endpoint serves the target.

    Raises UserError if it is unreachable, serves other models, has too small a context or rejects `_check_completion`.
    """
    client = openai.OpenAI(**_build_client_options(conf))
    try:
        cards = _parse_model_cards(client.with_options(**PROBE_OPTIONS).models.with_raw_response.list())
    except (openai.OpenAIError, UnansweredError) as error:
        raise UserError(
            f"answers.url: must be a reachable endpoint, got {conf.url} ({_classify_error(error)}); start the server, "
            f"or correct the URL (it should end in /v1) or the key in ${conf.api_key_env}"
        ) from error
    names = {conf.model} if conf.model else {target.name, target.path or target.name}
    card = next((card for card in cards if {card["id"], card.get("root")} & names), None)
    if card is None:
        raise UserError(
            f"answers.model: must be served by {conf.url}, got {' or '.join(sorted(names))}, but it serves "
            f"{', '.join(card['id'] for card in cards) or 'no models'}; start the target there, or set answers.model"
        )
    # An adapter's card has no context length; its base model's card, named as its parent, has one.
    base = next((base for base in cards if base["id"] == card.get("parent")), card)
    served = ServedModel(model=card["id"], context=base.get("max_model_len"))
    key = "context" if conf.context else "max_new_tokens"
    rule = "fit into" if conf.context else "leave room for a prompt in"
    require(
        # A prompt has at least one token.
        served.context is None or served.context >= (conf.context or conf.max_new_tokens + 1),
        f"answers.{key}: must {rule} the {served.context} tokens that {conf.url} serves, got "
        f"{getattr(conf, key)}; lower it, or raise the server's --max-model-len",
    )
    _check_completion(conf, served, client)
    return served


def _check_completion(conf: AnswersConf, served: ServedModel, client: openai.OpenAI) -> None:
    """Request one token with all settings; raise UserError if it is refused, and warn if no ids come back."""
    request = _build_request(conf, served.model, [1], seed=0, max_tokens=1)
    try:
        choice = _parse_choice(client.completions.with_raw_response.create(**request))
    except (openai.OpenAIError, UnansweredError) as error:
        raise UserError(
            f"answers.url: must accept token ids as a prompt, got {shorten(_redact_error(error, conf), 200)} from "
            f"{conf.url}; check that it serves /v1/completions, or remove a field by ~answers.extra_body.FIELD"
        ) from error
    if choice.get("token_ids") is None:
        log.warning("answers: %s returns no token ids: its text is tokenized again", conf.url)


class EndpointAnswerBackend:
    """An AnswerBackend that sends one request per answer."""

    def __init__(self, conf: AnswersConf, served: ServedModel, target: TargetConf, tokenizer: Any):
        self.conf, self.model, self.tokenizer = conf, served.model, tokenizer
        # One less, because SGLang rejects a request that would fill its context.
        self.max_prompt_tokens = conf.prompt_limit(served.context, read_context_length(target)) - 1
        self.eos_ids = read_eos_ids(target)
        self.end_token_id = find_end_of_turn_id(tokenizer, self.eos_ids)
        self.client = openai.AsyncOpenAI(**_build_client_options(conf))

    async def generate_answer(self, ids: list[int], *, key: int) -> Answer:
        """Request the answer to a prompt; retry as `conf` allows. Raises UnansweredError."""
        request = _build_request(self.conf, self.model, ids, seed=key, max_tokens=self.conf.max_new_tokens)
        waits_s = (min(FIRST_WAIT_S * 2.0**n, MAX_WAIT_S) for n in range(self.conf.retries))
        while True:
            try:
                reply = await self.client.completions.with_raw_response.create(**request)
                return self._parse_answer(_parse_choice(reply))
            except openai.OpenAIError as error:
                raise UnansweredError(_classify_error(error), _redact_error(error, self.conf)) from error
            except UnansweredError:
                if (wait_s := next(waits_s, None)) is None:
                    raise
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Close the HTTP client."""
        await self.client.close()

    def _parse_answer(self, choice: dict[str, Any]) -> Answer:
        """Build the answer; tokenize its text without ids, and add an end token that is missing."""
        ids, reason = choice.get("token_ids"), choice["finish_reason"]
        retokenized = ids is None
        if ids is None:
            ids = self.tokenizer(choice["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if reason == "stop" and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.end_token_id]
        return Answer(ids=ids, finish_reason=reason, retokenized=retokenized)


def find_end_of_turn_id(tokenizer: Any, eos_ids: Collection[int]) -> int:
    """Return the end-of-sequence id that the chat template writes after an answer, else the tokenizer's own."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
    input_ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return next((i for i in reversed(input_ids) if i in eos_ids), tokenizer.eos_token_id)


def _build_request(conf: AnswersConf, model: str, ids: list[int], *, seed: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": max_tokens,
        "seed": seed,
        "temperature": conf.temperature,
        "top_p": conf.top_p,
        "extra_body": conf.extra_body | ({"top_k": conf.top_k} if conf.top_k else {}),
    }


def _build_client_options(conf: AnswersConf) -> dict[str, Any]:
    return {
        "base_url": conf.url,
        "api_key": conf.api_key,
        "max_retries": conf.retries,
        "timeout": openai.Timeout(conf.timeout_s, connect=min(conf.timeout_s, CONNECT_TIMEOUT_S)),
    }


def _parse_model_cards(reply: Any) -> list[dict[str, Any]]:
    """Return the model cards of a reply. Raises UnansweredError."""
    try:
        return [card for card in json.loads(reply.content)["data"] if card["id"]]
    except (ValueError, LookupError, TypeError) as error:
        raise UnansweredError("no list of models") from error


def _parse_choice(reply: Any) -> dict[str, Any]:
    """Return the first choice of a response; raise UnansweredError if it holds no answer."""
    try:
        choice = json.loads(reply.content)["choices"][0]
        reason, _ = choice["finish_reason"], choice["text"]  # KeyError: a choice without text
    except (ValueError, LookupError, TypeError) as error:
        raise UnansweredError("no completion") from error
    if reason not in ("stop", "length"):
        raise UnansweredError(f"finish_reason {reason}")
    return choice


def _redact_error(error: Exception, conf: AnswersConf) -> str:
    """Return the error's text without the API key, which some servers repeat on rejecting it."""
    return str(error).replace(conf.api_key, "***") if conf.api_key != NO_API_KEY else str(error)


def _classify_error(error: Exception) -> str:
    """Return a short reason under which similar failures are counted."""
    match error:
        case openai.APITimeoutError():
            return "timeout"
        case openai.APIConnectionError():
            return "no connection"
        case openai.APIStatusError(status_code=status):
            return f"status {status}"
    return str(error)
