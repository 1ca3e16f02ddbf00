"""Decoding speed beside other engines with the same target and the same drafts, all in one race.

Our chain and our tree stand beside assisted generation of transformers and beside vLLM, which runs
in the engines' own environment, a process for each draft (`scripts/vllm_answers.py`). Between its
turns a process waits for a line on its stdin, so that one decodes and all others sleep. Without
that environment the table says how to get it, and compares with the others.
"""

import copy
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infer.report.tables import Table
from models.drafts.base import Draft
from models.speculate.tree import Tree, TreeConf, TreeKind
from models.target.target import Target
from scripts.bench_decoding import (
    Contender,
    Prompt,
    Run,
    decoding,
    generate,
    generate_settings,
    models,
    precision,
    race,
    shown,
    slots_of,
    speedup,
)

ROOT = Path(__file__).parent.parent
DRAFTED = 4  # tokens that every chain proposes
MISSING = "vLLM: not here, `make test-engines` installs it"
TURNS = 2  # of everyone on each prompt: forth and back
METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa", "causal_lm": "draft_model"}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS threads, on whichever core is free
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "5",  # ms that its threads spin when they are done: while others decode
}


@dataclass(kw_only=True)
class Group:
    """Everyone who decodes with one draft. The first of ours is the chain, or has no draft."""

    draft: str
    ours: list[Contender]
    others: list[Contender]
    serve: list[str] | None  # how vLLM is told of it; None where it cannot serve it


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, arguments: list[str]):
        openmp = environment() / "lib" / "libiomp5.so"  # several times faster than GNU's
        own = {"LD_PRELOAD": str(openmp), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [environment() / "bin" / "python", ROOT / "scripts" / "vllm_answers.py", *arguments],
            env=os.environ | SETTINGS | own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def ask(self, prompt: Prompt, count: int) -> dict:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"ids": prompt, "tokens": count}) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict:
        """The next line. What it said last, as an error, where it is gone."""
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.log.seek(0)
        raise RuntimeError(f"vLLM has ended: {self.log.read()[-4000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@dataclass(kw_only=True)
class Served(Contender):
    """A contender whose own process holds the clock, so that no pipe is timed."""

    engine: Engine

    def go(self, prompt: Prompt, count: int) -> None:
        told = self.engine.ask(prompt, count)
        self.note(told["ids"], seconds=told["seconds"], graphs=told["graphs"])


def compare(
    target: Target, drafts: dict[Path, Draft], tree: Tree, copies: dict[str, nn.Module],
    prompts: list[Prompt], *, new_tokens: int,
) -> Table:  # fmt: skip
    """The table: for each draft, by its folder, everyone who can decode with it."""
    model, slots = copies[precision(target)], slots_of(prompts, new_tokens)
    groups = [without_draft(target, model, prompts, new_tokens=new_tokens)]
    for folder, draft in drafts.items():
        ours = _ours(target, draft, tree, prompts, new_tokens=new_tokens)
        others = []
        if draft.speaker() is not None:  # a language model, which transformers takes too
            others = assisted(draft.method, model, models(folder, target.device)[precision(target)])
        serve = None
        if method := METHODS.get(draft.method):
            drafted = ours[0].settings[-1]
            serve = [f"--method={method}", f"--draft={folder}", f"--drafted={drafted}"]
        groups.append(Group(draft=draft.method, ours=ours, others=others, serve=serve))
    with vllm(groups, target, model, slots=slots + 2 * DRAFTED) as version:
        everyone = [one for group in groups for one in [*group.ours, *group.others]]
        race(everyone, prompts, new_tokens=new_tokens, turns=TURNS)
    return table(groups, version=version, prompts=len(prompts), new_tokens=new_tokens)


def without_draft(
    target: Target, model: nn.Module, prompts: list[Prompt], *, new_tokens: int
) -> Group:
    """One token at a time: our loop, and `generate` in the setting that is compiled."""
    loop = decoding(
        target, prompts=prompts, new_tokens=new_tokens, settings=["none", "ours", "0"]
    )  # fmt: skip
    slots = slots_of(prompts, new_tokens)
    copies = {precision(target): model}
    *_, static = generate_settings(copies, target.device, slots=slots, wrapped=False)
    static.settings = ["none", "generate, static", "0"]
    return Group(draft="none", ours=[loop], others=[static], serve=[])


def _ours(
    target: Target, draft: Draft, tree: Tree, prompts: list[Prompt], *, new_tokens: int
) -> list[Contender]:
    chain = TreeConf(kind=TreeKind.chain, depth=min(DRAFTED, draft.max_depth)).build()
    return [
        decoding(
            target, draft, shape, prompts=prompts, new_tokens=new_tokens,
            settings=[draft.method, name, str(shape.size)],
        )
        for name, shape in [("ours, chain", chain), ("ours, tree", tree)]
    ]  # fmt: skip


def assisted(draft: str, model: Any, assistant: Any) -> list[Contender]:
    """Assisted generation: a chain by the draft model, as long as it is told or as it sees fit."""
    found = []
    for count, schedule in [(DRAFTED, "constant"), (5, "heuristic")]:
        own = copy.deepcopy(assistant)
        own.generation_config.num_assistant_tokens = count
        own.generation_config.num_assistant_tokens_schedule = schedule
        own.generation_config.assistant_confidence_threshold = 0.0
        run = generate(model, assistant_model=own)
        found.append(Contender(settings=[draft, f"assisted, {schedule}", str(count)], run=run))
    return found


def environment() -> Path:
    return Path(os.environ.get("ENGINES", ROOT / ".venv-engines"))


@contextmanager
def vllm(groups: list[Group], target: Target, model: Any, *, slots: int) -> Iterator[str | None]:
    """Adds vLLM to each group that it can serve, until the block ends. Its version, if it is there.

    All its processes compile at once, before anyone is timed.
    """
    if not any(environment().glob(".ready-*")):  # of scripts/setup_engines.sh
        yield None
        return
    common = [model.name_or_path, f"--slots={slots}", f"--dtype={precision(target)}"]
    common += [] if target.device.compiles else ["--eager"]
    running, version = [], None
    try:
        for group in groups:
            if group.serve is not None:
                engine = Engine([*common, *group.serve])
                running.append(engine)
                settings = [group.draft, "vLLM", group.ours[0].settings[-1]]
                run = _ids(engine)
                group.others.append(Served(settings=settings, run=run, engine=engine))
        for engine in running:
            told = engine.hear()
            assert told["threads"] == torch.get_num_threads()
            version = told["version"]
        yield version
    finally:
        for engine in running:
            engine.close()


def _ids(engine: Engine) -> Run:
    return lambda prompt, count: engine.ask(prompt, count)["ids"]


def table(groups: list[Group], *, version: str | None, prompts: int, new_tokens: int) -> Table:
    """Everyone's tokens/s, and ours with the same draft over each of them."""
    truth = groups[0].ours[0].answers
    rows = [
        [*one.settings, f"{one.tokens_per_s:.1f}", *_ratios(group, one),
         f"{sum(map(list.__eq__, one.answers, truth))} of {len(truth)}", str(one.late_graphs)]
        for group in groups
        for one in [*group.ours, *group.others]
    ]  # fmt: skip
    if version is None:
        rows.append(["all", MISSING, *["-"] * 6])
    return Table(
        title="Beside other engines",
        note=f"{_words(groups)}{prompts} prompts, each {TURNS} times, {new_tokens} new tokens, "
        "from ids to ids; brackets: 95 % interval over prompts; ours: with the same draft, our "
        "chain, or our loop where there is no draft; same answers: as our loop gives; graphs: "
        f"compiled while measuring{f'; vLLM {version}' if version else ''}.",
        columns=["draft", "decoding", "proposed", "tokens/s", "ours / this",
                 "our tree / this", "same answers", "graphs"],
        rows=rows,
        labels=3,
    )  # fmt: skip


def _ratios(group: Group, one: Contender) -> list[str]:
    """Our chain over this one, and our tree; without a draft our loop, and no tree."""
    found = [shown(speedup(own, one, turns=TURNS)) for own in group.ours]
    return found if len(found) == 2 else [*found, "-"]


def _words(groups: list[Group]) -> str:
    """Of each draft, ours over the fastest of the others."""
    said = ""
    for group in groups:
        if group.others:
            best = max(group.others, key=lambda other: other.tokens_per_s)
            first, tree = _ratios(group, best)
            ours = (
                f"our loop is {first}" if tree == "-" else f"our chain is {first}, our tree {tree}"
            )
            said += f"Draft {group.draft}: {ours} times the fastest other ({best.settings[1]}). "
    return said
