"""One conversation, answered turn by turn: each behind the history as answered so far.

What the target was shown and what it generated is recorded as token ids. Turns share a document
while a prompt begins with all that is known; where a template rewrites what it has said (it drops
old thoughts, say), or text comes back as other tokens, a new document begins.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from data.answers.config import AnswersConf
from data.answers.tool_calls import as_called, calls, message_of, same_call
from data.chat.template import Chat, Message
from data.sources.prepared_rows import Drawn, Row, Spans
from data.sources.row_formats import MisfitError

OTHER_CALL = "the target did not call the tool that the data calls"
NEW_CALL = "the target called a tool that the data does not call"
CUT = "the answer was cut at answers.max_new_tokens"
FULL = "the context was full"
TOO_LONG = "longer than the context"
TAIL = 8  # characters of a prompt by which the place of its answer is known: all may be rewritten


class UnansweredError(Exception):
    """A request failed for good. `str(error)` is the reason under which it is counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail


@dataclass(kw_only=True)
class Answer:
    """What the target generated, with the token that ended it."""

    ids: list[int]
    finish_reason: str  # stop | length
    retokenised: bool = False  # made from text: may differ from what was generated


@runtime_checkable
class Asker(Protocol):
    """A way to the target."""

    room: int  # tokens that a prompt may have

    async def ask(self, ids: list[int], *, key: int) -> Answer:
        """The answer to a prompt; `key` is of the sampling noise. Raises UnansweredError."""
        ...

    async def close(self) -> None: ...


def key_of(seed: int, row_id: str, turn: int) -> int:
    """The seed of one answer: 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}/{turn}/{row_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(kw_only=True)
class Dialogue:
    """A row while it is answered."""

    row: Row
    asker: Asker
    tokenizer: Any
    conf: AnswersConf
    documents: list[Spans] = field(default_factory=list)
    answers: list[Drawn] = field(default_factory=list)
    ended: str = ""  # why turns of the data were not answered

    async def answered(self) -> Row:
        """The row with the target's answers. Raises MisfitError where there can be none."""
        if self.row.messages is None:
            await self._ask(self.tokenizer(self.row.text, verbose=False)["input_ids"])
            return replace(self.row, documents=self.documents, answers=self.answers)
        arguments = {**self.row.template, "tools": self.row.tools}
        chat = Chat(tokenizer=self.tokenizer, arguments=arguments)
        chat.text(self.row.messages)  # refused before anything is asked
        said = await self._converse(chat, self.row.messages)
        return replace(self.row, messages=said, documents=self.documents, answers=self.answers)

    async def _converse(self, chat: Chat, messages: list[Message]) -> list[Message]:
        """The messages with the target's own in place of the assistant's, as far as they go."""
        said: list[Message] = []
        asks = messages if messages[-1]["role"] == "assistant" else [*messages, None]
        for place, message in enumerate(asks):
            if message is not None and message["role"] != "assistant":
                said.append(message)
                continue
            prompt = chat.text(said, prompt=True)
            ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
            if self.answers and len(ids) > self.asker.room:
                self.ended = FULL
                break
            answer = await self._ask(ids)
            text = self._text(answer)
            called = message is not None and message.get("tool_calls")
            whole = chat.text([*said, message]) if called else ""
            why = self._ends(answer, text, prompt, whole)
            said.append(as_called(message, text) if whole and not why else own(chat, said, text))
            if why and place + 1 < len(asks):
                self.ended = why
                break
        last = max(n for n, message in enumerate(said, 1) if message["role"] == "assistant")
        return said[:last]

    def _ends(self, answer: Answer, text: str, prompt: str, called: str) -> str:
        """Why nothing of the data can follow this answer; empty where it can.

        `called` is the conversation with the data's own call of a tool, if it has one here.
        """
        if answer.finish_reason != "stop":
            return CUT
        if called:
            return "" if same_call(text, prompt, called) else OTHER_CALL
        return NEW_CALL if self.row.tools and calls(text) else ""

    async def _ask(self, prompt: list[int]) -> Answer:
        if not prompt:
            raise MisfitError("without a token")
        if len(prompt) > self.asker.room:
            raise MisfitError(TOO_LONG)
        turn = len(self.answers)
        key = key_of(self.conf.seed, self.row.id, turn)
        answer = await self.asker.ask(prompt, key=key)
        self._record(prompt, answer.ids)
        self.answers.append(
            Drawn(
                turn=turn,
                temperature=self.conf.temperature,
                top_p=self.conf.top_p,
                top_k=self.conf.top_k,
                seed=key,
                finish_reason=answer.finish_reason,
                tokens=len(answer.ids),
                retokenised=answer.retokenised,
            )
        )  # fmt: skip
        return answer

    def _record(self, prompt: list[int], answer: list[int]) -> None:
        known = self.documents[-1].ids if self.documents else None
        if known is None or prompt[: len(known)] != known:
            self.documents.append(Spans(ids=[], spans=[]))
        document = self.documents[-1]
        document.ids = [*prompt, *answer]
        document.spans.append([len(prompt), len(document.ids)])

    def _text(self, answer: Answer) -> str:
        ids = answer.ids[:-1] if answer.finish_reason == "stop" else answer.ids
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def own(chat: Chat, said: list[Message], text: str) -> Message:
    """What was said, as the message that renders to it: templates write or trim spaces."""
    message = message_of(text)
    for tried in (message, {**message, "content": message["content"].strip()}):
        prompt, whole = chat.text(said, prompt=True), chat.text([*said, tried])
        if text in whole and whole[: whole.rfind(text)].endswith(prompt[-TAIL:]):
            return tried
    return message
