"""The target in this process as an Asker: what waits is decoded together."""

import asyncio
from dataclasses import dataclass

from data.answers.config import AnswersConf
from data.answers.dialogue import Answer
from infer.decode import bucket
from infer.generate import answers
from models.target import Target

MOMENT_S = 0.002  # in which the rows that go on ask again


@dataclass(kw_only=True)
class _Request:
    ids: list[int]
    key: int
    answer: asyncio.Future[Answer]


class TargetAsker:
    """Answers do not depend on what is decoded together: noise is keyed by the request."""

    def __init__(self, target: Target, conf: AnswersConf):
        self.target, self.conf = target, conf
        self.room = conf.room(getattr(target.config, "max_position_embeddings", None))
        self.waiting: list[_Request] = []
        self.serving: asyncio.Task[None] | None = None

    async def ask(self, ids: list[int], *, key: int) -> Answer:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append(_Request(ids=ids, key=key, answer=answer))
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
        while self.waiting:
            await asyncio.sleep(MOMENT_S)
            asked, self.waiting = self.waiting, []
            for place, ids in self._decoded(asked):
                ended = ids[-1] in self.target.eos_ids
                asked[place].answer.set_result(
                    Answer(ids=ids, finish_reason="stop" if ended else "length")
                )
                await asyncio.sleep(0)  # its row goes on

    def _decoded(self, asked: list[_Request]):
        prompts = [request.ids for request in asked]
        most = self.conf.max_new_tokens
        return answers(
            self.target, prompts, max_new_tokens=most, sampling=self.conf.sampling,
            batch=self.conf.batch, row_ids=[request.key for request in asked],
            slots=bucket(max(map(len, prompts)) + most) if self.target.device.static else None,
        )  # fmt: skip
