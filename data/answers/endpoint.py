"""The target behind an HTTP server: any that speaks OpenAI's `/v1/completions`.

Prompts are sent as token ids, rendered here from the target's own chat template, so that neither
the server's template nor its parsers come between. vLLM and SGLang return ids too
(`return_token_ids`); the text of other servers is split anew, and the answer marked `retokenised`.
The client retries what may pass (408, 409, 429, 5xx, timeouts, lost connections), waiting longer
each time.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import openai

from data.answers.config import AnswersConf
from data.answers.dialogue import Answer, UnansweredError
from models.errors import UserError
from models.target import TargetConf

log = logging.getLogger(__name__)
QUICK = {"max_retries": 2, "timeout": 10.0}  # for the first question: is anybody there?


@dataclass(kw_only=True, frozen=True)
class Served:
    """What an endpoint says of the model that it serves."""

    model: str
    context: int | None  # tokens, where it says so


def check(conf: AnswersConf, target: TargetConf) -> Served:
    """Whether the endpoint is there and serves the target. Raises UserError; loads nothing."""
    client = openai.OpenAI(base_url=conf.url, api_key=conf.key)
    try:
        cards = client.with_options(**QUICK).models.list().data
    except openai.OpenAIError as error:
        raise UserError(
            f"answers.url: must be an endpoint that can be reached, got {conf.url} "
            f"({_reason(error)}); start the server, or mend the url (it ends in /v1) or "
            f"the key in ${conf.key_env}"
        ) from error
    names = {conf.model} if conf.model else {target.name, target.path}
    card = next((card for card in cards if {card.id, getattr(card, "root", None)} & names), None)
    if card is None:
        raise UserError(
            f"answers.model: must be served by {conf.url}, got "
            f"{' or '.join(sorted(filter(None, names)))} where it serves "
            f"{', '.join(card.id for card in cards) or 'none'}; start the target there, or name it "
            "as the server does"
        )
    served = Served(model=card.id, context=getattr(card, "max_model_len", None))
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
    """One token, to see that ids are taken and whether ids come back."""
    patient = client.with_options(max_retries=conf.retries, timeout=conf.timeout_s)
    try:
        completion = patient.completions.create(
            model=served.model, prompt=[1], max_tokens=1, extra_body=conf.extra
        )
    except openai.OpenAIError as error:
        raise UserError(
            f"answers.url: must complete token ids, got {_reason(error)} from {conf.url}; see that "
            "it serves /v1/completions, or leave out fields that it refuses (answers.extra)"
        ) from error
    if _ids(completion.choices[0]) is None:
        log.warning("answers: %s gives no token ids: its text is split into tokens anew", conf.url)


class Endpoint:
    """An Asker: one request an answer."""

    def __init__(self, conf: AnswersConf, served: Served, target: TargetConf, tokenizer: Any):
        self.conf, self.model, self.tokenizer = conf, served.model, tokenizer
        self.room = conf.room(served.context, target.source.context())
        self.eos_ids = target.source.eos_ids()
        self.end = end_of_turn(tokenizer, self.eos_ids)
        self.client = openai.AsyncOpenAI(
            base_url=conf.url, api_key=conf.key, max_retries=conf.retries, timeout=conf.timeout_s
        )

    async def ask(self, ids: list[int], *, key: int) -> Answer:
        conf = self.conf
        try:
            completion = await self.client.completions.create(
                model=self.model, prompt=ids, max_tokens=conf.max_new_tokens, seed=key,
                temperature=conf.temperature, top_p=conf.top_p,
                extra_body={"top_k": conf.top_k or -1, **conf.extra},
            )  # fmt: skip
        except openai.OpenAIError as error:
            raise UnansweredError(_reason(error), str(error)) from error
        choice = completion.choices[0]
        if choice.finish_reason not in ("stop", "length"):  # a server that ends says `abort`
            raise UnansweredError(f"finish_reason {choice.finish_reason}")
        return self._answer(choice)

    async def close(self) -> None:
        await self.client.close()

    def _answer(self, choice: Any) -> Answer:
        given = _ids(choice)
        ids = given
        if ids is None:
            ids = self.tokenizer(choice.text, add_special_tokens=False, verbose=False)["input_ids"]
        if choice.finish_reason == "stop" and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.end]
        return Answer(ids=ids, finish_reason=choice.finish_reason, retokenised=given is None)


def end_of_turn(tokenizer: Any, eos_ids: Collection[int]) -> int:
    """The token that ends an answer: of those that may, the one that the chat template writes."""
    if tokenizer.chat_template is not None:
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        rendered = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
        written = [token for token in rendered if token in eos_ids]
        if written:
            return written[-1]
    return tokenizer.eos_token_id


def _ids(choice: Any) -> list[int] | None:
    return getattr(choice, "token_ids", None)


def _reason(error: openai.OpenAIError) -> str:
    """A few words that like failures share."""
    match error:
        case openai.APITimeoutError():
            return "timeout"
        case openai.APIConnectionError():
            return "no connection"
        case openai.APIStatusError(status_code=status):
            return f"status {status}"
    return type(error).__name__
