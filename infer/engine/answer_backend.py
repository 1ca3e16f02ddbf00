"""The answer backend that decodes with the target in this process, with continuous batching.

The processes of a split target decode in step: the main one has the requests, and tells the others what to decode.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from data.answers.dialogue import Answer
from data.prepare_config import AnswersConf
from data.sources.rows import require_embeddings
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder, TakeRequests
from infer.engine.requests import Request
from models.parallel.processes import share_from_main
from models.targets.target import Target

BATCH_WAIT_S = 0.002  # before the first batch, so that requests sent together share it
MIN_BATCH_DIVISOR = 4  # prompts wait until 1/4 of the rows are free, to share a prefill pass
SESSION_DIVISOR = 2  # a session takes the shorter half of what waits, and more of that length


def _take_error(task: asyncio.Task[None]) -> None:
    """Keep asyncio from printing the error of a task that nobody awaits: an interrupt ends the event loop first."""
    with suppress(asyncio.CancelledError):
        task.exception()


class TargetAnswerBackend:
    """An AnswerBackend over a Target; noise is keyed by the request, so answers do not depend on the batch."""

    def __init__(self, target: Target, conf: AnswersConf):
        self.target, self.conf = target, conf
        self.max_prompt_tokens = conf.prompt_limit(getattr(target.config, "max_position_embeddings", None))
        self.waiting: list[Request] = []
        self.answer_futures: dict[Request, asyncio.Future[Answer]] = {}
        self.serve_task: asyncio.Task[None] | None = None
        self.is_decoding = False

    async def generate_answer(self, ids: list[int], *, key: int) -> Answer:
        require_embeddings(ids, self.target.vocab_size)
        request = Request(ids=ids, row_id=key, max_new_tokens=self.conf.max_new_tokens)
        future = self.answer_futures[request] = asyncio.get_running_loop().create_future()
        self.waiting.append(request)
        if self.serve_task is None or self.serve_task.done():
            self.serve_task = asyncio.create_task(self._serve())
            self.serve_task.add_done_callback(_take_error)
        serve_task = self.serve_task
        await asyncio.wait((future, serve_task), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            serve_task.result()  # raises the error that ended it
        return future.result()

    async def close(self) -> None:
        """Let the other processes of a split target go, unless an error has left them in the middle of a session."""
        if not self.is_decoding:
            self._share(None)

    def _share(self, message: Any) -> None:
        if self.target.processes > 1:
            share_from_main(message)

    async def _serve(self) -> None:
        await asyncio.sleep(BATCH_WAIT_S)
        while self.waiting:
            for request in self._decode_waiting():
                ids = request.generation.ids
                reason = "stop" if ids[-1] in self.target.eos_ids else "length"
                self.answer_futures.pop(request).set_result(Answer(ids=ids, finish_reason=reason))
                await asyncio.sleep(0)  # lets the caller go on, and perhaps add a request
            self.is_decoding = False

    def _decode_waiting(self) -> Iterator[Request]:
        """Decode the shorter half of the waiting requests; yield each when it is finished.

        Short prompts share neither slots nor passes with long ones. Requests that arrive meanwhile join if they are no
        longer than that half. A device that compiles slowly takes all in one session, for fewer graphs.
        """
        device = self.target.device
        lengths = sorted(len(request.ids) for request in self.waiting)
        half = min(len(lengths), max(self.conf.batch, len(lengths) // SESSION_DIVISOR))
        count = len(lengths) if device.compiles_slowly else half
        longest = bucket_length(lengths[count - 1]) if device.has_static_shapes else lengths[count - 1]
        batch = self.conf.batch if device.has_static_shapes else min(self.conf.batch, len(lengths))

        def take(count: int) -> list[Request]:
            if not count:
                return []
            self.waiting.sort(key=lambda request: len(request.ids))
            fitting = sum(len(request.ids) <= longest for request in self.waiting[:count])
            requests, self.waiting = self.waiting[:fitting], self.waiting[fitting:]
            self._share([(request.ids, request.row_id) for request in requests])
            return requests

        self.is_decoding = True
        self._share((longest, batch))
        return stream_answers(self.target, self.conf, longest, batch, take)


def answer_beside_main(target: Target, conf: AnswersConf) -> None:
    """Decode what the main process decodes, with this process's part of the target, until it closes its backend."""

    def take(count: int) -> list[Request]:
        requests = _receive() if count else []
        return [Request(ids=ids, row_id=key, max_new_tokens=conf.max_new_tokens) for ids, key in requests]

    while (session := _receive()) is not None:
        longest, batch = session
        for _ in stream_answers(target, conf, longest, batch, take):
            pass


def _receive() -> Any:
    """Return what the main process shares; exit if it is gone, since it tells its error itself."""
    try:
        return share_from_main(None)
    except RuntimeError:
        sys.exit(1)


def stream_answers(
    target: Target, conf: AnswersConf, longest: int, batch: int, take: TakeRequests
) -> Iterator[Request]:
    """Yield the requests that `take` returns as they finish; prompts have at most `longest` tokens, in `batch` rows."""
    decoder = Decoder(target, sampling=conf.sampling, slots=longest + conf.max_new_tokens, batch=batch)
    return decoder.stream(take, min_free_rows=max(1, batch // MIN_BATCH_DIVISOR), eos_ids=target.eos_ids)
