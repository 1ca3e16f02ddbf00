"""Decoding speed compared with other engines on the same target and drafts, interleaved in one run.

Our chain and our tree are compared with assisted generation of transformers and with vLLM, which
runs in the engines' own environment, one process per draft (`scripts/engines/vllm_answers.py`). Between its
turns a process is stopped: the threads of idle ones wake thousands of times a second, which made rounds of
other contenders take up to 1.4 times as long. Without that environment the table names the command that
installs it and omits vLLM.
"""

import copy
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infer.report.number_format import Table, format_estimate
from models.drafts.base import Draft
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.tree import Tree, TreeKind
from scripts.engines.decoding import (
    Contender,
    Prompt,
    decoding,
    generate,
    generate_settings,
    models,
    precision,
    race,
    slots_of,
    speedup,
)

ROOT = Path(__file__).parents[2]
DRAFTED = 4  # tokens per proposal of every chain
MISSING = "vLLM: not here, `make test-engines` installs it"
TURNS = 2  # of every contender on each prompt: in order and in reverse
KILLED_WITH_US = ["setpriv", "--pdeathsig", "KILL"]  # of util-linux; a stopped process would outlive a killed race
COLUMNS = ["draft", "decoding", "proposed", "tokens/s", "ours / this", "our tree / this", "same answers", "graphs"]
METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa", "causal_lm": "draft_model"}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS threads, not bound to cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "5",  # ms that idle threads spin, which costs the other contenders CPU time
}


@dataclass(kw_only=True)
class Group:
    """The contenders of a draft; the first of `ours` is the chain, or our loop without a draft."""

    draft: str
    ours: list[Contender]
    others: list[Contender]
    serve: list[str] | None  # vLLM's arguments for the draft; None if it cannot serve it


class Engine:
    """A vLLM process with a pipe for prompts and answers, which runs until it is ready and during its answers alone."""

    def __init__(self, arguments: list[str]):
        openmp = environment() / "lib" / "libiomp5.so"  # several times faster than GNU's
        threading = {"LD_PRELOAD": str(openmp), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        program = [environment() / "bin" / "python", Path(__file__).with_name("vllm_answers.py")]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        variables = os.environ | SETTINGS | threading
        self.process = subprocess.Popen([*KILLED_WITH_US, *program, *arguments], env=variables, text=True, **streams)

    def request(self, prompt: Prompt, count: int) -> dict:
        """Return the answer of `count` tokens."""
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # `read_line` says why the process has ended
            self.process.stdin.write(json.dumps({"ids": prompt, "tokens": count}) + "\n")
            self.process.stdin.flush()
        return self.read_line()

    def decode(self, prompt: Prompt, count: int) -> list[int]:
        return self.request(prompt, count)["ids"]

    def read_line(self) -> dict:
        """Read the next line and stop the process; raise RuntimeError with the log's end if it has ended."""
        assert self.process.stdout
        if line := self.process.stdout.readline():
            self.process.send_signal(signal.SIGSTOP)
            return json.loads(line)
        self.log.seek(0)
        raise RuntimeError(f"vLLM has ended: {self.log.read()[-4000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@dataclass(kw_only=True)
class Served(Contender):
    """A contender whose process measures its own time, so that the pipe is not timed."""

    engine: Engine

    def go(self, prompt: Prompt, count: int) -> None:
        answer = self.engine.request(prompt, count)
        self.note(answer["ids"], seconds=answer["seconds"], graphs=answer["graphs"])


def compare(
    target: Target,
    drafts: dict[Path, Draft],
    tree: Tree,
    copies: dict[str, nn.Module],
    prompts: list[Prompt],
    *,
    new_tokens: int,
) -> Table:
    """Build the table of all contenders of each draft; `drafts` maps folders to drafts."""
    model, slots = copies[precision(target)], slots_of(prompts, new_tokens)
    groups = [without_draft(target, model, prompts, new_tokens=new_tokens)]
    groups += [
        with_draft(target, model, folder, draft, tree, prompts, new_tokens=new_tokens)
        for folder, draft in drafts.items()
    ]
    with vllm(groups, target, model, slots=slots + 2 * DRAFTED) as version:
        contenders = [c for group in groups for c in [*group.ours, *group.others]]
        race(contenders, prompts, new_tokens=new_tokens, turns=TURNS)
    return table(groups, version=version, prompts=len(prompts), new_tokens=new_tokens)


def without_draft(target: Target, model: nn.Module, prompts: list[Prompt], *, new_tokens: int) -> Group:
    """Build the group without a draft: our loop and `generate` in its compiled setting."""
    loop = decoding(target, prompts=prompts, new_tokens=new_tokens, settings=["none", "ours", "0"])
    copies = {precision(target): model}
    *_, static = generate_settings(copies, target.device, new_tokens=new_tokens, wrapped=False)
    static.settings = ["none", "generate, static", "0"]
    return Group(draft="none", ours=[loop], others=[static], serve=[])


def with_draft(
    target: Target, model: nn.Module, folder: Path, draft: Draft, tree: Tree, prompts: list[Prompt], *, new_tokens: int
) -> Group:
    """Build the group of a draft: our chain and tree, and the engines that can serve it."""
    chain = TreeConf(kind=TreeKind.chain, depth=min(DRAFTED, draft.max_depth)).build()
    ours = [
        decoding(
            target, draft, shape, prompts=prompts, new_tokens=new_tokens, settings=[draft.method, name, str(shape.size)]
        )
        for name, shape in [("ours, chain", chain), ("ours, tree", tree)]
        if shape is chain or shape != chain
    ]
    others = []
    if draft.as_language_model() is not None:  # transformers can assist with it too
        others = assisted(draft.method, model, models(folder, target.device)[precision(target)])
    serve = None
    if method := METHODS.get(draft.method):
        drafted = ours[0].settings[-1]
        serve = [f"--method={method}", f"--draft={folder}", f"--drafted={drafted}"]
    return Group(draft=draft.method, ours=ours, others=others, serve=serve)


def assisted(draft: str, model: Any, assistant: Any) -> list[Contender]:
    """Build contenders of assisted generation: with chains of one length, and as transformers sets it up."""
    constant = copy.deepcopy(assistant)
    constant.generation_config.num_assistant_tokens = DRAFTED
    constant.generation_config.num_assistant_tokens_schedule = "constant"
    constant.generation_config.assistant_confidence_threshold = 0.0
    default = copy.deepcopy(assistant)
    return [
        Contender(settings=[draft, "assisted, constant", str(DRAFTED)], run=generate(model, assistant_model=constant)),
        Contender(settings=[draft, "assisted, default", "at most 20"], run=generate(model, assistant_model=default)),
    ]


def environment() -> Path:
    return Path(os.environ.get("ENGINES", ROOT / ".venv-engines"))


@contextmanager
def vllm(groups: list[Group], target: Target, model: Any, *, slots: int) -> Iterator[str | None]:
    """Add vLLM to each group that it can serve while the block runs; yield its version or None.

    All vLLM processes compile concurrently, before any contender is timed.
    """
    if not any(environment().glob(".ready-*")):  # of scripts/setup.sh engines
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
                group.others.append(Served(settings=settings, run=engine.decode, engine=engine))
        for engine in running:
            status = engine.read_line()
            assert status["threads"] == torch.get_num_threads()
            version = status["version"]
        yield version
    finally:
        for engine in running:
            engine.close()


def table(groups: list[Group], *, version: str | None, prompts: int, new_tokens: int) -> Table:
    """Build the table: tokens/s of every contender, and our speed with the same draft over it."""
    reference = groups[0].ours[0].answers
    contenders = [(group, contender) for group in groups for contender in [*group.ours, *group.others]]
    rows = [contender.cells(*_ratios(group, contender), reference=reference) for group, contender in contenders]
    if version is None:
        rows.append(["all", MISSING, *["-"] * 6])
    return Table(
        title="Beside other engines",
        note=f"{_words(groups)}{prompts} prompts, each {TURNS} times, {new_tokens} new tokens, "
        "from ids to ids; brackets: 95 % interval over prompts; ours: with the same draft, our "
        "chain, or our loop if there is no draft; same answers: as our loop gives; graphs: "
        f"compiled while measuring{f'; vLLM {version}' if version else ''}.",
        columns=COLUMNS,
        rows=rows,
        label_columns=3,
    )


def _ratios(group: Group, contender: Contender) -> list[str]:
    """Return the speed of our chain (our loop without a draft) and of our tree over a contender."""
    ratios = [format_estimate(speedup(ours, contender, turns=TURNS)) for ours in group.ours]
    return ratios if len(ratios) == 2 else [*ratios, "-"]  # without a draft, or where the tree is the chain


def _words(groups: list[Group]) -> str:
    """Describe for each draft our speed over the fastest other contender."""
    text = ""
    for group in groups:
        if group.others:
            best = max(group.others, key=lambda other: other.tokens_per_s)
            first, tree = _ratios(group, best)
            name = "loop" if group.draft == "none" else "chain"
            ours = f"our {name} is {first}" if tree == "-" else f"our chain is {first}, our tree {tree}"
            text += f"Draft {group.draft}: {ours} times the fastest other ({best.settings[1]}). "
    return text
