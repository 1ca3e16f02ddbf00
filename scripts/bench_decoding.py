"""Decoding speed beside transformers' `generate` on the same target, prompt by prompt.

Everyone continues every prompt by the same number of tokens, greedily and past any end of text. The
clock runs from token ids to token ids: prefill, host work and all. The order turns from prompt to
prompt and every second prompt reverses it, so that a drift of the machine falls on all alike.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn

from infer.engine.decode import Decoder, bucket
from infer.measure.intervals import Estimate, bootstrap_t
from infer.report.tables import Table
from models.device import Device, graphs
from models.drafts.base import Draft
from models.speculate.sampling import SamplingConf
from models.speculate.tree import NO_TREE, Tree
from models.target.target import Target

LOOKUPS = (3, 5, 10)  # tokens that prompt lookup proposes at most
WARM_UP_TOKENS = 8
Prompt = list[int]
Run = Callable[[Prompt, int], list[int]]  # a prompt and how many tokens to add -> those tokens


@dataclass(kw_only=True)
class Contender:
    """One way to continue a prompt, and what it did."""

    settings: list[str]  # the cells that name it in the table
    run: Run
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    late_graphs: int = 0  # compiled while the clock ran: must be 0 for a fair figure

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / sum(self.seconds)

    def go(self, prompt: Prompt, count: int) -> None:
        """Continue a prompt by `count` tokens against the clock."""
        compiled, began = graphs(), time.perf_counter()
        answer = self.run(prompt, count)
        self.note(answer, seconds=time.perf_counter() - began, graphs=graphs() - compiled)

    def note(self, answer: list[int], *, seconds: float, graphs: int) -> None:
        self.seconds.append(seconds)
        self.late_graphs += graphs
        self.answers.append(answer)


def race(
    contenders: list[Contender], prompts: list[Prompt], *, new_tokens: int, turns: int = 1
) -> None:
    """Warm everyone up, then let everyone continue each prompt before the next.

    Every second turn is taken in reverse: with two turns a prompt, ours and theirs alternate ABBA.
    """
    quiet = not sys.stderr.isatty()
    few = list({bucket(len(prompt)): prompt for prompt in prompts}.values())
    for contender in track(contenders, "warming up", disable=quiet):
        for prompt in few:
            contender.run(prompt, min(WARM_UP_TOKENS, new_tokens))
    again = [prompt for prompt in prompts for _ in range(turns)]
    for number, prompt in enumerate(track(again, "prompts", disable=quiet)):
        first = number // 2 % len(contenders)
        order = contenders[first:] + contenders[:first]
        for contender in order if number % 2 == 0 else reversed(order):
            contender.go(prompt, new_tokens)
            assert len(contender.answers[-1]) == new_tokens


def decoding(
    target: Target, draft: Draft | None = None, tree: Tree = NO_TREE, *,
    prompts: list[Prompt], new_tokens: int, settings: list[str],
) -> Contender:  # fmt: skip
    """Our own runtime. What it does without a draft is the baseline of the reports.

    So it captures three layers there too, as an evaluation lets every mode do.
    """
    n = target.num_layers
    decoder = Decoder(
        target, draft, tree, sampling=SamplingConf(), slots=slots_of(prompts, new_tokens),
        layers=None if draft else sorted({2, n // 2, n - 3}),
    )  # fmt: skip

    def run(prompt: Prompt, count: int) -> list[int]:
        (done,) = decoder.decode([prompt], row_ids=[0], max_new_tokens=count)
        return done.ids

    return Contender(settings=settings, run=run)


def models(place: str | Path, device: Device) -> dict[str, nn.Module]:
    """Fresh copies of a model in both precisions, without the hooks of our own."""
    from transformers import AutoModelForCausalLM

    return {
        str(dtype).removeprefix("torch."): endless(
            AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa").to(
                device.torch_device
            )
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def endless(model: nn.Module) -> nn.Module:
    """`model`, which `generate` now lets run past the end of a text."""
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: nn.Module, *, forward: Callable | None = None, **options: Any) -> Run:
    """`generate` with these options; `forward` takes the place of the model's own while it runs."""

    def run(prompt: Prompt, count: int) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        if forward is not None:
            model.forward = forward
        try:
            done = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                **options,
            )  # fmt: skip
        finally:
            model.__dict__.pop("forward", None)
        return done[0, len(prompt) :].tolist()

    return run


def generate_settings(
    copies: dict[str, nn.Module], device: Device, *, slots: int, wrapped: bool
) -> list[Contender]:
    """`generate` in every setting: precision x cache x compiled or not.

    It compiles nothing with a dynamic cache; `wrapped` does what a user can do instead.
    """
    found = []
    for precision, model in copies.items():
        static = {"cache_implementation": "static", "max_cache_len": slots}
        ways = {
            ("dynamic", "no"): generate(model),
            ("static", "no"): generate(model, disable_compile=True, **static),
        }
        if device.compiles:
            ways["static", "yes"] = generate(model, compile_config=_compiles_here(), **static)
        if device.compiles and wrapped:
            grows = torch.compile(model.forward, dynamic=True)
            ways["dynamic", "wrapped"] = generate(model, forward=grows)
        found += [Contender(settings=["generate", precision, *way], run=ways[way]) for way in ways]
    return found


def _compiles_here() -> Any:
    """`generate`'s own compilation, which it leaves out on a CPU unless told."""
    from transformers import CompileConfig

    conf = CompileConfig(dynamic=False)
    conf._compile_all_devices = True
    return conf


def lookup_settings(copies: dict[str, nn.Module]) -> list[Contender]:
    """Prompt lookup with short and long proposals. It takes dynamic caches only, uncompiled."""
    return [
        Contender(
            settings=["prompt lookup", precision, str(count)],
            run=generate(model, prompt_lookup_num_tokens=count),
        )
        for precision, model in copies.items()
        for count in LOOKUPS
    ]


def speedup(ours: Contender, other: Contender, *, turns: int = 1) -> Estimate | None:
    """Our tokens/s over theirs, as a ratio of sums over prompts, each of so many `turns`."""
    seconds = np.column_stack([other.seconds, ours.seconds])
    return bootstrap_t(seconds.reshape(-1, turns, 2).sum(1), support=(0.0, np.inf))


def table(
    ours: Contender, others: list[Contender], *, title: str, columns: list[str], new_tokens: int
) -> Table:
    """Everyone's tokens/s, ours over theirs, and whose answers are ours token for token."""
    best = max(others, key=lambda other: other.tokens_per_s)
    rows = []
    for one in [ours, *others]:
        same = sum(map(list.__eq__, one.answers, ours.answers))
        rows.append([
            *one.settings, f"{one.tokens_per_s:.1f}", shown(speedup(ours, one)),
            f"{same} of {len(ours.answers)}", str(one.late_graphs),
        ])  # fmt: skip
    return Table(
        title=title,
        note=f"Ours is {shown(speedup(ours, best))} times the fastest of the others "
        f"({', '.join(best.settings)}). {len(ours.answers)} prompts, {new_tokens} new tokens each, "
        "from ids to ids; brackets: 95 % interval over prompts; graphs: compiled while measuring.",
        columns=[*columns, "tokens/s", "ours / this", "same answers", "graphs"],
        rows=rows,
        labels=len(columns),
    )


def shown(value: Estimate | None) -> str:
    if value is None:
        return "-"
    if value.ci95 is None:
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f} [{value.ci95[0]:.2f}, {value.ci95[1]:.2f}]"


def slots_of(prompts: list[Prompt], new_tokens: int) -> int:
    return max(map(len, prompts)) + new_tokens


def autoregressive(
    target: Target, copies: dict[str, nn.Module], prompts: list[Prompt], *, new_tokens: int,
    wrapped: bool = False,
) -> Table:  # fmt: skip
    """Our loop with an empty tree beside `generate`."""
    ours = decoding(
        target, prompts=prompts, new_tokens=new_tokens,
        settings=["ours", precision(target), "static", "yes" if target.device.compiles else "no"],
    )  # fmt: skip
    slots = slots_of(prompts, new_tokens)
    others = generate_settings(copies, target.device, slots=slots, wrapped=wrapped)
    race([ours, *others], prompts, new_tokens=new_tokens)
    return table(
        ours, others, title="Autoregressive decoding beside transformers generate",
        columns=["decoding", "precision", "cache", "compiled"], new_tokens=new_tokens,
    )  # fmt: skip


def drafted(
    target: Target, draft: Draft, tree: Tree, copies: dict[str, nn.Module],
    prompts: list[Prompt], *, new_tokens: int,
) -> Table:  # fmt: skip
    """Tree decoding with a trained draft beside prompt lookup."""
    ours = decoding(
        target, draft, tree, prompts=prompts, new_tokens=new_tokens,
        settings=[f"ours, {tree.kind.name} tree", precision(target), str(tree.size)],
    )  # fmt: skip
    others = lookup_settings(copies)
    race([ours, *others], prompts, new_tokens=new_tokens)
    return table(
        ours, others, title="Tree decoding beside transformers prompt lookup",
        columns=["decoding", "precision", "proposed tokens"], new_tokens=new_tokens,
    )  # fmt: skip


def precision(target: Target) -> str:
    return str(target.device.dtype).removeprefix("torch.")
