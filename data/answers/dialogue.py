"""One conversation, answered turn by turn: each prompt is the history as answered so far.

Prompts and answers are recorded as token ids. Turns share a document while a prompt begins with all of its tokens.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from data.chat.answer_parsing import (
    build_exact_message,
    decode_answer,
    is_same_tool_call,
    merge_tool_call,
    parse_tool_calls,
)
from data.chat.template import ChatTemplate, Message
from data.prepare_config import AnswersConf
from data.sources.prepared_rows import PreparedRow, RecordedDocument, SamplingInfo
from data.sources.rows import RowRejectedError, require_row

DIFFERENT_TOOL_CALL = "the target did not call the tool that the data calls"
UNEXPECTED_TOOL_CALL = "the target called a tool that the data does not call"
ANSWER_CUT = "the answer was cut at answers.max_new_tokens"
CONTEXT_FULL = "the context was full"
PROMPT_TOO_LONG = "longer than the context"


class UnansweredError(RowRejectedError):
    """Error of a request that failed permanently, counted by `str(error)`; a later run may answer the row."""


@dataclass(kw_only=True)
class Answer:
    """Token ids that the target generated, with the token that ended them."""

    ids: list[int]
    finish_reason: str  # stop | length
    retokenized: bool = False  # ids were made from text and may differ from the generated ones


@runtime_checkable
class AnswerBackend(Protocol):
    """A backend that generates the target's answers."""

    max_prompt_tokens: int

    async def generate_answer(self, ids: list[int], *, key: int) -> Answer:
        """Generate the answer to a prompt; `key` seeds the sampling. Raises UnansweredError."""
        ...

    async def close(self) -> None:
        """Release the backend's resources."""


def derive_answer_seed(seed: int, row_id: str, turn: int) -> int:
    """Derive the seed of one answer, with 31 bits so that every server accepts it."""
    digest = hashlib.sha256(f"{seed}/{turn}/{row_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(kw_only=True)
class Dialogue:
    """A row that is being answered, with the documents and answers recorded so far."""

    row: PreparedRow
    backend: AnswerBackend
    tokenizer: Any
    conf: AnswersConf
    documents: list[RecordedDocument] = field(default_factory=list)
    answers: list[SamplingInfo] = field(default_factory=list)
    end_reason: str = ""  # why later turns of the data were not answered

    async def answer_turns(self) -> PreparedRow:
        """Return the row with the target's answers; raise RowRejectedError if the row cannot be answered."""
        messages = self.row.messages
        if messages is None:
            await self._generate_answer(self.tokenizer(self.row.text, verbose=False)["input_ids"])
        else:
            arguments = {**self.row.template, "tools": self.row.tools}
            chat = ChatTemplate(tokenizer=self.tokenizer, arguments=arguments)
            chat.render(messages)  # raises before any request if the template rejects the row
            messages = await self._answer_messages(chat, messages)
        return replace(self.row, messages=messages, documents=self.documents, answers=self.answers)

    async def _answer_messages(self, chat: ChatTemplate, messages: list[Message]) -> list[Message]:
        """Return the messages with the target's answers, up to the last one that it could give."""
        history: list[Message] = []
        turns = join_answers(messages)
        if turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})  # stands for an answer that the data lacks
        for index, message in enumerate(turns):
            if message["role"] != "assistant":
                history.append(message)
                continue
            prompt = chat.render(history, add_generation_prompt=True)
            ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
            if self.answers and len(ids) > self.backend.max_prompt_tokens:
                self.end_reason = CONTEXT_FULL
                break
            answer = await self._generate_answer(ids)
            written = answer.ids[:-1] if answer.finish_reason == "stop" else answer.ids
            text = decode_answer(self.tokenizer, written)
            rendered = chat.render([*history, message]) if message.get("tool_calls") else ""
            reason = self._find_end_reason(answer, text, prompt, rendered)
            if not rendered and any(other["role"] == "tool" for other in turns[index + 1 : index + 2]):
                reason = reason or DIFFERENT_TOOL_CALL  # the result of a call that the data does not show
            history.append(
                merge_tool_call(message, text) if rendered and not reason else build_exact_message(chat, history, text)
            )
            if reason and index + 1 < len(turns):
                self.end_reason = reason
                break
        end = max(n for n, message in enumerate(history, 1) if message["role"] == "assistant")
        return history[:end]

    def _find_end_reason(self, answer: Answer, text: str, prompt: str, rendered: str) -> str:
        """Return the reason why the dialogue ends with this answer; empty if it goes on.

        `rendered` is the conversation with the data's own tool call; empty without a call.
        """
        if answer.finish_reason != "stop":
            return ANSWER_CUT
        if rendered:
            return "" if is_same_tool_call(text, prompt, rendered) else DIFFERENT_TOOL_CALL
        return UNEXPECTED_TOOL_CALL if self.row.tools and parse_tool_calls(text) else ""

    async def _generate_answer(self, prompt_ids: list[int]) -> Answer:
        """Return the answer to a prompt, and record it in `documents` and `answers`."""
        require_row(bool(prompt_ids), "without a token")
        require_row(len(prompt_ids) <= self.backend.max_prompt_tokens, PROMPT_TOO_LONG)
        turn = len(self.answers)
        key = derive_answer_seed(self.conf.seed, self.row.id, turn)
        answer = await self.backend.generate_answer(prompt_ids, key=key)
        if not self.documents or prompt_ids[: len(self.documents[-1].ids)] != self.documents[-1].ids:
            self.documents.append(RecordedDocument(ids=[], spans=[]))
        document = self.documents[-1]
        document.ids = [*prompt_ids, *answer.ids]
        document.spans.append([len(prompt_ids), len(document.ids)])
        self.answers.append(
            SamplingInfo(
                turn=turn,
                temperature=self.conf.temperature,
                top_p=self.conf.top_p,
                top_k=self.conf.top_k,
                seed=key,
                finish_reason=answer.finish_reason,
                tokens=len(answer.ids),
                retokenized=answer.retokenized,
            )
        )
        return answer


def join_answers(messages: list[Message]) -> list[Message]:
    """Return the messages with one answer for several in a row: the last, or the one that calls a tool."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "assistant":
            if message.get("tool_calls") or not joined[-1].get("tool_calls"):
                joined[-1] = message
        else:
            joined.append(message)
    return joined
