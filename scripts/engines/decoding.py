"""Decoding speed compared with transformers' `generate` on the same target, prompt by prompt.

Every contender continues every prompt by the same number of tokens, greedily and past any end of text. Times run from
token ids to token ids and include prefill and host work. The order rotates from prompt to prompt and every second
prompt reverses it, so that drift of the machine affects all contenders alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.measure.bench import alternate_order
from infer.report.number_format import Table, format_estimate
from infer.results.intervals import Estimate, bootstrap_t
from models.device.device import Device
from models.drafts.base import Draft
from models.io.console import track_progress
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, Tree

LOOKUPS = (3, 5, 10)  # maximum tokens that prompt lookup proposes
WARM_UP_TOKENS = 8
Prompt = list[int]
Run = Callable[[Prompt, int], list[int]]  # a prompt and how many tokens to add -> those tokens


@dataclass(kw_only=True)
class Contender:
    """A way to continue a prompt, with its measured results."""

    settings: list[str]  # the cells of its row that identify it
    run: Run
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)  # compiled while an answer was timed; must be 0 for a fair figure
    accepted: list[int] = field(default_factory=list)  # draft tokens of each round of our decoder's last answer

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / sum(self.seconds)

    def go(self, prompt: Prompt, count: int) -> None:
        """Continue a prompt by `count` tokens and record the time."""
        compiled, began = Device.count_graphs(), time.perf_counter()
        answer = self.run(prompt, count)
        self.note(answer, seconds=time.perf_counter() - began, graphs=Device.count_graphs() - compiled)

    def note(self, answer: list[int], *, seconds: float, graphs: int) -> None:
        self.seconds.append(seconds)
        self.graphs.append(graphs)
        self.answers.append(answer)

    def forget_last(self) -> None:
        """Forget the last answer and its time."""
        for values in (self.seconds, self.graphs, self.answers):
            values.pop()

    def cells(self, *ratios: str, reference: list[list[int]]) -> list[str]:
        """Return the row of a table: settings, speed, ratios, and how many answers are those of `reference`."""
        same = sum(map(list.__eq__, self.answers, reference))
        equal, graphs = f"{same} of {len(reference)}", str(sum(self.graphs))
        return [*self.settings, f"{self.tokens_per_s:.1f}", *ratios, equal, graphs]


def race(contenders: list[Contender], prompts: list[Prompt], *, new_tokens: int, turns: int = 1) -> None:
    """Warm up every contender, then time all of them on each prompt before the next.

    Every second turn runs in reverse: with two turns per prompt, two contenders alternate ABBA.
    """
    warm_up(contenders, prompts, new_tokens=new_tokens)
    shortest = min(prompts, key=len)
    repeated_prompts = [prompt for prompt in prompts for _ in range(turns)]
    for number, prompt in enumerate(track_progress(repeated_prompts, "prompts")):
        take_turns(contenders, prompt, number=number, new_tokens=new_tokens, untimed=shortest)


def warm_up(contenders: list[Contender], prompts: list[Prompt], *, new_tokens: int) -> None:
    """Let every contender continue a prompt of each padded length."""
    prompt_per_bucket = list({bucket_length(len(prompt)): prompt for prompt in prompts}.values())
    for contender in track_progress(contenders, "warming up"):
        for prompt in prompt_per_bucket:
            contender.run(prompt, min(WARM_UP_TOKENS, new_tokens))


def take_turns(contenders: list[Contender], prompt: Prompt, *, number: int, new_tokens: int, untimed: Prompt) -> None:
    """Let every contender continue the prompt, in an order that depends on its number.

    An answer during which a graph was compiled is timed once more. A few tokens after the prompt `untimed` go before
    each turn: what a contender last used a minute ago may have left the memory, as a system that reclaims cold pages
    reads weights and code from the disk again.
    """
    for contender in alternate_order(contenders, number):
        contender.run(untimed, min(WARM_UP_TOKENS, new_tokens))
        contender.go(prompt, new_tokens)
        if contender.graphs[-1]:
            contender.forget_last()
            contender.go(prompt, new_tokens)
        assert len(contender.answers[-1]) == new_tokens


def decoding(
    target: Target,
    draft: Draft | None = None,
    tree: Tree = NO_TREE,
    *,
    prompts: list[Prompt],
    new_tokens: int,
    settings: list[str],
) -> Contender:
    """Build a contender that runs our decoder; without a draft it is the baseline of the reports.

    The baseline captures three layers too, like every mode of an evaluation.
    """
    n, slots = target.num_layers, slots_of(prompts, new_tokens)
    layers = None if draft else sorted({2, n // 2, n - 3})
    decoder = Decoder(target, draft, tree, sampling=SamplingConf(), slots=slots, layers=layers)

    def run(prompt: Prompt, count: int) -> list[int]:
        (generation,) = decoder.decode([prompt], row_ids=[0], max_new_tokens=count)
        contender.accepted = generation.accepted
        return generation.ids

    contender = Contender(settings=settings, run=run)
    return contender


def models(path: str | Path, device: Device) -> dict[str, nn.Module]:
    """Load fresh copies of a model in both precisions, without our hooks."""
    from transformers import AutoModelForCausalLM

    return {
        str(dtype).removeprefix("torch."): endless(
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device.torch_device)
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def endless(model: nn.Module) -> nn.Module:
    """Configure `model` so that `generate` continues past the end of a text; return it."""
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(
    model: nn.Module, *, forward: Callable | None = None, static_tokens: int | None = None, **options: Any
) -> Run:
    """Return a function that runs `generate`; `forward` replaces the model's own while it runs.

    With `static_tokens` its cache is static and has room for so many tokens beside the prompt's padded length: prompts
    of one padded length share a graph, and none attends to the slots that only longer ones need.
    """

    def run(prompt: Prompt, count: int) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        if static_tokens is not None:
            model._previous_max_cache_length = -1  # else no cache is smaller than the one before it
            slots = bucket_length(len(prompt)) + static_tokens
            options.update(cache_implementation="static", max_cache_len=slots)
        if forward is not None:
            model.forward = forward
        try:
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
            )
        finally:
            model.__dict__.pop("forward", None)
        return output[0, len(prompt) :].tolist()

    return run


def generate_settings(
    copies: dict[str, nn.Module], device: Device, *, new_tokens: int, wrapped: bool
) -> list[Contender]:
    """Build a contender for every setting of `generate`: precision x cache x compiled or not.

    `generate` compiles nothing with a dynamic cache; `wrapped` adds torch.compile around the model, as a user can.
    """
    contenders = []
    for precision, model in copies.items():
        eager = generate(model, disable_compile=True, static_tokens=new_tokens)
        runs = {("dynamic", "no"): generate(model), ("static", "no"): eager}
        if device.compiles:
            runs["static", "yes"] = generate(model, compile_config=_compiles_here(), static_tokens=new_tokens)
        if device.compiles and wrapped:
            compiled_forward = torch.compile(model.forward, dynamic=True)
            runs["dynamic", "wrapped"] = generate(model, forward=compiled_forward)
        contenders += [Contender(settings=["generate", precision, *setting], run=runs[setting]) for setting in runs]
    return contenders


def _compiles_here() -> Any:
    """Return a config that makes `generate` compile on a CPU too, which it skips by default."""
    from transformers import CompileConfig

    conf = CompileConfig(dynamic=False)
    conf._compile_all_devices = True
    return conf


def lookup_settings(copies: dict[str, nn.Module]) -> list[Contender]:
    """Build contenders of prompt lookup by length of proposals; it supports only dynamic caches, not compiled."""
    return [
        Contender(settings=["prompt lookup", precision, str(n)], run=generate(model, prompt_lookup_num_tokens=n))
        for precision, model in copies.items()
        for n in LOOKUPS
    ]


def speedup(ours: Contender, other: Contender, *, turns: int = 1) -> Estimate | None:
    """Return our tokens/s over theirs, a ratio of sums over prompts with `turns` runs each."""
    seconds = np.column_stack([other.seconds, ours.seconds])
    return bootstrap_t(seconds.reshape(-1, turns, 2).sum(1), support=(0.0, np.inf))


def table(ours: Contender, others: list[Contender], *, title: str, columns: list[str], new_tokens: int) -> Table:
    """Build the table: tokens/s, our speed over theirs, and the number of answers equal to ours."""
    best = max(others, key=lambda other: other.tokens_per_s)
    return Table(
        title=title,
        note=f"Ours is {format_estimate(speedup(ours, best))} times the fastest of the others "
        f"({', '.join(best.settings)}). {len(ours.answers)} prompts, {new_tokens} new tokens each, "
        "from ids to ids; brackets: 95 % interval over prompts; graphs: compiled while measuring.",
        columns=[*columns, "tokens/s", "ours / this", "same answers", "graphs"],
        rows=[c.cells(format_estimate(speedup(ours, c)), reference=ours.answers) for c in [ours, *others]],
        label_columns=len(columns),
    )


def slots_of(prompts: list[Prompt], new_tokens: int) -> int:
    return max(map(len, prompts)) + new_tokens


def autoregressive(
    target: Target, copies: dict[str, nn.Module], prompts: list[Prompt], *, new_tokens: int, wrapped: bool = False
) -> Table:
    """Compare our loop with an empty tree with `generate`."""
    settings = ["ours", precision(target), "static", "yes" if target.device.compiles else "no"]
    ours = decoding(target, prompts=prompts, new_tokens=new_tokens, settings=settings)
    others = generate_settings(copies, target.device, new_tokens=new_tokens, wrapped=wrapped)
    race([ours, *others], prompts, new_tokens=new_tokens)
    title = "Autoregressive decoding beside transformers generate"
    columns = ["decoding", "precision", "cache", "compiled"]
    return table(ours, others, title=title, columns=columns, new_tokens=new_tokens)


def drafted(
    target: Target, draft: Draft, tree: Tree, copies: dict[str, nn.Module], prompts: list[Prompt], *, new_tokens: int
) -> Table:
    """Compare tree decoding with a trained draft with prompt lookup."""
    settings = [f"ours, {tree.kind.name} tree", precision(target), str(tree.size)]
    ours = decoding(target, draft, tree, prompts=prompts, new_tokens=new_tokens, settings=settings)
    others = lookup_settings(copies)
    race([ours, *others], prompts, new_tokens=new_tokens)
    title, columns = "Tree decoding beside transformers prompt lookup", ["decoding", "precision", "proposed tokens"]
    return table(ours, others, title=title, columns=columns, new_tokens=new_tokens)


def precision(target: Target) -> str:
    return str(target.device.dtype).removeprefix("torch.")
