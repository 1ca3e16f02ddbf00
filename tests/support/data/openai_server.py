"""Serve OpenAI's completions by a target on disk, in this process or in a separate process.

As vLLM does, it takes prompts as token ids and returns ids if asked to. `faulty` lets every fifth
completion fail, in turn with 429, 500 and by closing the connection. A server that is killed comes
back after a while: a second process watches it.
"""

import itertools
import os
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from infer.engine.answers import generate_answers
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import CPU
from tests.support.runs.killing import FORKS, TIMEOUT_S

GONE_S = 1.0  # without a server, after a kill


def app(
    folder: str,
    *,
    name: str,
    context: int = 256,
    ids: bool = True,
    faulty: bool = False,
    odd: Iterable[Any] = (),
    refused: str = "",
) -> FastAPI:
    """Build the server. `odd`: replies instead of the first answers; `refused`: a field that it rejects."""
    target = load_target(TargetConf(name="served", path=folder), CPU)
    served, asked, odd = FastAPI(), itertools.count(1), iter(odd)
    served.state.requests = []

    @served.get("/v1/models")
    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "test",
                    "root": folder,
                    "max_model_len": context,
                },
                {"id": "adapter", "object": "model", "parent": name},
            ],
        }

    @served.post("/v1/completions")
    async def completions(asked_by: Request) -> Any:
        request = await asked_by.json()
        served.state.requests.append(request)
        if faulty and (broken := fail_every_fifth(next(asked))):
            return broken
        if await asked_by.is_disconnected():
            raise HTTPException(408)  # which nobody reads
        if refused in request:
            error = {"message": f"extra inputs are not permitted: {refused}", "code": 400}
            return JSONResponse({"error": error}, 400)
        if request["max_tokens"] > 1 and (reply := next(odd, None)) is not None:
            return reply
        prompt = request["prompt"]
        if len(prompt) + request["max_tokens"] >= context:  # as SGLang
            raise HTTPException(400, "longer than the context")
        sampling = SamplingConf(
            temperature=request.get("temperature", 1.0),
            top_p=request.get("top_p", 1.0),
            top_k=max(request.get("top_k", -1), 0),
        )
        ((_, answer),) = generate_answers(
            target, [prompt], max_new_tokens=request["max_tokens"], sampling=sampling, row_ids=[request.get("seed", 0)]
        )
        ended = answer[-1] in target.eos_ids
        text = target.tokenizer.decode(answer[:-1] if ended else answer)
        reason = "stop" if ended else "length"
        choice = {"index": 0, "text": text, "finish_reason": reason}
        if ids and request.get("return_token_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": prompt}
        return {"id": "0", "object": "text_completion", "created": 0, "model": name, "choices": [choice]}

    return served


def fail_every_fifth(number: int) -> Response | None:
    """Fail every fifth request, each time in another way; a broken reply is returned."""
    failure, rest = divmod(number, 5)
    if rest:
        return None
    match failure % 3:
        case 0:
            raise HTTPException(429, "too many requests", headers={"retry-after-ms": "20"})
        case 1:
            raise HTTPException(500, "out of order")
    return Response(headers={"content-length": "9"})  # of which none comes


@contextmanager
def serving(folder: Path, *, port: int, **options: Any) -> Iterator[BaseProcess]:
    """Run the server in a process that a second process watches; kill both at the end."""
    watcher = FORKS.Process(target=watch_server, args=(folder, port, options))
    watcher.start()
    try:
        wait_for(port)
        yield watcher
    finally:
        server = psutil.Process(watcher.pid).children()
        watcher.kill()
        watcher.join()
        for process in server:
            process.kill()


def watch_server(folder: Path, port: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    served = app(str(folder), **options)
    while server := os.fork():  # the target is loaded once
        os.waitpid(server, 0)
        time.sleep(GONE_S)
    uvicorn.run(served, host="127.0.0.1", port=port, log_level="critical")


def restart(watcher: BaseProcess) -> None:
    """Kill the server; the watcher starts another."""
    for server in psutil.Process(watcher.pid).children():
        server.kill()


def wait_for(port: int) -> None:
    """Wait until a server answers at the port."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return
