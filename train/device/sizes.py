"""Decode with one, two and four layers of large targets, and extrapolate what all their layers would take.

The weights are random: shapes alone decide what compilation, a step and its memory cost. The tables of the
vocabulary have their full size.
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import release_memory
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from infer.commands.decode_plan import trace_phases
from infer.config import DecodePlanConf
from infer.engine.decode import Decoder
from infer.engine.requests import Generation
from infer.inputs.memory_check import MEMORY_MARGIN, find_core_bytes
from models.device.cpu import count_packed_bytes
from models.device.device import Device
from models.device.memory_watch import MemoryWatch
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.meta_model import MetaTarget
from models.targets.loading import freeze_model
from models.targets.pretrained import SHIPPED_CONFIGS
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, Tree, TreeKind
from train.device.checks import Check, CheckContext, CheckSkippedError
from train.device.place import find_cache_folder

GIB, MS = 2**30, 1000
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
LAYERS = (1, 2, 4)
PROMPT_TOKENS, NEW_TOKENS = 128, 17
CHAIN = TreeConf(kind=TreeKind.chain, depth=4)
WEIGHT_STD = 0.02  # that of new models of these families
BLOCK = 1_000_003  # random numbers that fill all weights; a prime, so that rows differ
REMEDY = "send all output; stages=[sizes] device.compile=false tells whether it is the compiler"


Figures = dict[str, Any]  # the time and the memory of decoding with a number of layers; None: not measured


def list_checks(
    context: CheckContext, shapes: Mapping[str, dict[str, Any]] | None = None, *, layers: Sequence[int] = LAYERS
) -> Iterator[Check]:
    """Yield a check per model and number of layers, and one for all layers of each model.

    `shapes` are the fields of the models' config.json by name, by default those of `MODELS`.
    """
    if shapes is None:
        shapes = {name: json.loads((SHIPPED_CONFIGS / f"{name}.json").read_text()) for name in MODELS}
    for name, shape in shapes.items():
        for count in layers:
            run = partial(check_size, context, name, shape, count)
            yield Check(name=f"{name}, layers: {count}", run=run, remedy=REMEDY)
        yield Check(name=f"{name}, all layers", run=partial(check_all_layers, context, name, shape), remedy=REMEDY)


def check_size(context: CheckContext, name: str, shape: dict[str, Any], layers: int) -> str:
    """Measure decoding with some layers of a model, and keep the figures for the extrapolation."""
    figures = measure_size(context, name, shape, layers)
    with _figures_file(context, name).open("a") as file:
        file.write(json.dumps(figures) + "\n")
    peak, planned, cached = (_format_size(figures[name]) for name in ("peak_bytes", "planned_bytes", "cache_bytes"))
    return (
        f"first use takes {figures['compile_s']:.1f} s more, prompt {figures['prompt_ms']:.1f} ms, step "
        f"{figures['step_ms']:.2f} ms, round {figures['round_ms']:.2f} ms, memory {peak}, planned {planned}, "
        f"compiled files {cached}"
    )


def check_all_layers(context: CheckContext, name: str, shape: dict[str, Any]) -> str:
    """Extrapolate the figures of few layers to all of a model, beside the memory that is planned for it."""
    file = _figures_file(context, name)
    measured = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if len(measured) < 2:
        raise CheckSkippedError(f"a line takes two numbers of layers, got {len(measured)}")
    total = shape["num_hidden_layers"]
    seconds, step_ms, round_ms, peak_bytes = (
        extrapolate(measured, field, total) for field in ("compile_s", "step_ms", "round_ms", "peak_bytes")
    )
    return (
        f"from {' and '.join(str(figures['layers']) for figures in measured[-2:])} to {total} layers: first use takes "
        f"{_format_figure(seconds)} s more, step {_format_figure(step_ms)} ms, round {_format_figure(round_ms)} ms, "
        f"memory {_format_size(peak_bytes)}, planned {_format_size(plan_bytes(context, name, shape))}"
    )


def extrapolate(measured: Sequence[Figures], field: str, layers: int) -> float | None:
    """Return a figure at `layers` on the line through the two largest sizes; None if not measured or if the line falls.

    The first size bears what a process takes once. Noise alone makes the line fall, where a layer takes less than it.
    """
    fewer, more = measured[-2:]
    low, high = fewer[field], more[field]
    if low is None or high is None or high < low:
        return None
    return high + (high - low) / (more["layers"] - fewer["layers"]) * (layers - more["layers"])


def measure_size(context: CheckContext, name: str, shape: dict[str, Any], layers: int) -> Figures:
    """Build some layers of a model and decode with them; raise CheckSkippedError if they would not fit."""
    device, shape = context.device, shape | {"num_hidden_layers": layers}
    planned_bytes = plan_bytes(context, name, shape)
    release_memory()  # of the size before
    torch.compiler.reset()
    check_fit(context, planned_bytes)
    watch, files_before = MemoryWatch(device), count_cache_bytes(device)
    target = build_random_target(f"{name}, layers: {layers}", shape, device)
    compile_s, prompt_ms, step_ms = time_decoding(target)
    lookup_s, _, round_ms = time_decoding(target, NgramDraft(), CHAIN.build())
    files_after = count_cache_bytes(device)
    return {
        "layers": layers,
        "compile_s": compile_s + lookup_s,  # first uses, without and with lookup, above later ones
        "prompt_ms": prompt_ms,
        "step_ms": step_ms,
        "round_ms": round_ms,  # of lookup
        "planned_bytes": planned_bytes,
        "peak_bytes": watch.peak_bytes(),
        "cache_bytes": None if files_before is None or files_after is None else files_after - files_before,
    }


def plan_bytes(context: CheckContext, name: str, shape: dict[str, Any]) -> int:
    """Return the bytes per core that `infer.plan` gives this decoding, with packed copies of weights."""
    with torch.device("meta"):
        model = build_model(shape, context.device.dtype)
    target = MetaTarget(model, name=name, device=context.reference)
    packed_bytes = count_packed_bytes(model) if context.device.packs_weights else 0
    conf = DecodePlanConf(tree=CHAIN, prompt_tokens=PROMPT_TOKENS, context=PROMPT_TOKENS + NEW_TOKENS)
    return packed_bytes + max(phase.peak_bytes.total() for phase in trace_phases(conf, target, NgramDraft()))


def check_fit(context: CheckContext, planned_bytes: int) -> None:
    """Raise CheckSkippedError if the device, or the host where weights are made, has less than the plan's memory."""
    core_bytes = find_core_bytes(context.conf.memory_gib, context.device)
    limits = {"the host": float(psutil.virtual_memory().available)}
    if core_bytes is not None:
        limits[context.device.name] = (1 - MEMORY_MARGIN) * core_bytes
    for place, limit in limits.items():
        if planned_bytes > limit:
            raise CheckSkippedError(f"takes {_format_size(planned_bytes)}, {place} has {_format_size(limit)} for it")


def build_random_target(name: str, shape: dict[str, Any], device: Device) -> Target:
    """Build a target whose weights repeat a block of random numbers, which takes seconds where drawing takes minutes.

    It is built on the host and moved, as targets are when they are loaded.
    """
    with no_init_weights():
        model = build_model(shape, device.dtype)
    block = WEIGHT_STD * torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).to(device.dtype)
    for weight in model.parameters():
        if weight.ndim > 1:  # those of norms are 1
            for part in weight.data.view(-1).split(BLOCK):
                part.copy_(block[: len(part)])
    target = freeze_model(model, None, name=name, device=device)
    model.to(device.torch_device)
    return target


def build_model(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)


def time_decoding(target: Target, draft: Draft | None = None, tree: Tree = NO_TREE) -> tuple[float, float, float]:
    """Return the seconds by which the first use is longer than a second one, and ms of a prompt and of a round."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(target.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()

    def decode() -> tuple[float, Generation]:
        start = time.perf_counter()
        decoder = Decoder(target, draft, tree, sampling=SamplingConf(), slots=PROMPT_TOKENS + NEW_TOKENS)
        (answer,) = decoder.decode([prompt], row_ids=[0], max_new_tokens=NEW_TOKENS)
        return time.perf_counter() - start, answer

    (first_s, _), (second_s, answer) = decode(), decode()
    return max(0.0, first_s - second_s), MS * answer.prefill_s, MS * statistics.median(answer.round_s)


def count_cache_bytes(device: Device) -> int | None:
    """Return the bytes of the device's compiled files, or None if their folder is not known."""
    folder = find_cache_folder(device)
    return None if folder is None else sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _figures_file(context: CheckContext, name: str) -> Path:
    """Return the file of a model's figures, which a stage that is started again continues."""
    return context.folder / f"{name.replace('/', '-')}.jsonl"


def _format_figure(figure: float | None) -> str:
    return "unknown" if figure is None else f"{figure:.1f}"


def _format_size(size: int | float | None) -> str:
    """Return bytes in a unit that suits them.

    >>> _format_size(3 * 2**29), _format_size(5 * 2**20), _format_size(None)
    ('1.50 GiB', '5.0 MiB', 'unknown')
    """
    if size is None:
        return "unknown"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
