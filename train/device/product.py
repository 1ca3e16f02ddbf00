"""Second stage: one matrix product, eager, compiled, and compiled again in another process from the cache.

Each runs in a process of its own, because on some devices a process takes all cores that it sees.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from data.chat.processes import exit_with_parent
from models.device.device import Device
from models.device.opening import open_route
from train.device.checks import Check, CheckContext, CheckFailedError, CheckSkippedError, shorten_error
from train.device.place import find_cache_folder

SIZE = 256


def list_checks(context: CheckContext) -> Iterator[Check]:
    device, seconds = context.device, {}

    def compile_in_process() -> str:
        seconds["first"] = run_alone(multiply, device, True)
        return f"{seconds['first']:.1f} s with compilation"

    yield Check(
        name="eager",
        run=lambda: f"{run_alone(multiply, device, False):.2f} s",
        remedy="the device does not compute at all: reinstall its driver and packages",
    )
    yield Check(name="compiled", run=compile_in_process, remedy="the compiler fails; device.compile=false runs eagerly")
    yield Check(
        name="again in another process",
        run=lambda: compile_again(device, seconds.get("first")),
        remedy="graphs are not found again: set device.cache_dir in the launcher, before torch is imported",
    )


def compile_again(device: Device, first_s: float | None) -> str:
    """Compile in another process; check that it writes no graphs to the cache."""
    folder = find_cache_folder(device)
    if folder is None:
        raise CheckSkippedError("no folder is known in which this device keeps its graphs")
    before = list_artifacts(folder)
    seconds = run_alone(multiply, device, True)
    text = f"{seconds:.1f} s, {first_s or 0:.1f} s the first time"
    if new := list_artifacts(folder) - before:
        raise CheckFailedError(f"compiled again ({len(new)} new files in {folder}): {text}")
    return text


def list_artifacts(folder: Path) -> set[Path]:
    """Return the files of the cache, without locks."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def multiply(device: Device, compiles: bool) -> float:
    """Multiply two matrices on the device and return the seconds; raise CheckFailedError for another result."""
    open_route(device.name)  # loads what the device needs in a new process
    numbers = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, SIZE, SIZE, generator=numbers)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left @ right + 1

    function = device.compile(product) if compiles else product
    start = time.perf_counter()
    result = function(left.to(device.torch_device), right.to(device.torch_device))
    device.synchronize()
    seconds = time.perf_counter() - start
    if not torch.allclose(result.cpu(), product(left, right), rtol=1e-2, atol=1e-1):
        raise CheckFailedError("the product is not the CPU's")
    return seconds


def run_alone(function: Callable, *args: Any, timeout_s: float = 600.0) -> Any:
    """Call a function in a new process and return its result; raise CheckFailedError for its error or a crash."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(timeout_s) else None
    except EOFError:
        answer = None
    if answer is None:
        process.join(timeout=5)
        ending = f"did not end within {timeout_s:.0f} s" if process.is_alive() else f"ended with {process.exitcode}"
        process.kill()
        raise CheckFailedError(f"the process {ending}")
    process.join(timeout=60)  # it writes its cache to the end
    process.kill()
    result, error = answer
    if error is not None:
        raise CheckFailedError(error)
    return result


def _send_result(sender: Any, function: Callable, args: tuple) -> None:
    Thread(target=exit_with_parent, daemon=True).start()
    try:
        sender.send((function(*args), None))
    except Exception as error:  # noqa: BLE001 - a device may raise anything
        sender.send((None, shorten_error(error)))
