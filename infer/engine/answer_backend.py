"""The target in this process as an Asker: rows that end make room for what waits."""

import asyncio
from collections.abc import Iterator

from data.answers.config import AnswersConf
from data.answers.dialogue import Answer
from infer.engine.decode import Decoder, Request, bucket
from models.target.target import Target

MOMENT_S = 0.002  # in which the first rows ask
TOGETHER = 4  # rows are read by a quarter of the batch: one alone leaves a pass half empty


class TargetAsker:
    """Answers do not depend on what is decoded together: noise is keyed by the request."""

    def __init__(self, target: Target, conf: AnswersConf):
        self.target, self.conf = target, conf
        self.room = conf.room(getattr(target.config, "max_position_embeddings", None))
        self.waiting: list[Request] = []
        self.answers: dict[Request, asyncio.Future[Answer]] = {}
        self.serving: asyncio.Task[None] | None = None

    async def ask(self, ids: list[int], *, key: int) -> Answer:
        request = Request(ids=ids, row_id=key, limit=self.conf.max_new_tokens)
        answer = self.answers[request] = asyncio.get_running_loop().create_future()
        self.waiting.append(request)
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        serving = self.serving
        await asyncio.wait((answer, serving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            serving.result()  # raises what went wrong
        return answer.result()

    async def close(self) -> None:
        """Nothing is held."""

    async def _serve(self) -> None:
        await asyncio.sleep(MOMENT_S)
        while self.waiting:
            for request in self._answered():
                ids = request.answer.ids
                reason = "stop" if ids[-1] in self.target.eos_ids else "length"
                self.answers.pop(request).set_result(Answer(ids=ids, finish_reason=reason))
                await asyncio.sleep(0)  # its row goes on, and may ask again meanwhile

    def _answered(self) -> Iterator[Request]:
        """What waits, and what comes to wait, but for prompts longer than all that do now."""
        static, most = self.target.device.static, self.conf.max_new_tokens
        longest = max(len(request.ids) for request in self.waiting)
        longest = bucket(longest) if static else longest
        batch = self.conf.batch if static else min(self.conf.batch, len(self.waiting))

        def take(count: int) -> list[Request]:
            some = [request for request in self.waiting if len(request.ids) <= longest][:count]
            self.waiting = [request for request in self.waiting if request not in some]
            return some

        decoder = Decoder(
            self.target, sampling=self.conf.sampling, slots=longest + most, batch=batch
        )
        least = max(1, batch // TOGETHER)
        return decoder.stream(take, least=least, eos_ids=self.target.eos_ids)
