"""The project's own commands as they stand in scripts, manifests and pages, found and composed."""

import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.entry import compose
from infer.compare import parse_arguments
from models.device.config import DeviceName
from models.device.device import Device
from train.checks import check_run_device

ROOT = Path(__file__).parents[3]
LAUNCHED = re.compile(
    r"\b(?:python3?|torchrun|accelerate launch)\b(?P<launcher>[^\n#;|]*?)"
    r" -m (?P<module>(?:train|infer|data)(?:\.\w+)*)(?=[\s`)]|$)(?P<rest>[^\n`]*)"
)
SUBMITTED = re.compile(r"\bsbatch (?P<launcher>[^\n]*)scripts/slurm_train\.sh(?P<rest>[^\n`]*)")
REFUSED = re.compile(r"\$ (python [^\n]*)\n\s*error: ([^\n]*)")
ENTRY = re.compile(r'@entry_point\("(\w+)", (\w+)\)')
ENDS = re.compile(r"&&?$|\|\|?$|;$|\d?[<>]")
FLAGS = {"-m", "--multirun", "--help"}  # of Hydra; --cfg takes a value
COMPARE = "infer.compare"  # takes paths, no config
SLURM_PROCESSES = 64  # a node, where nobody says
INSTANCES = {DeviceName.xla: "trn1.32xlarge", DeviceName.neuron: "trn2.48xlarge"}


@dataclass(frozen=True)
class Command:
    """`python -m MODULE WORDS`, on so many processes."""

    module: str
    words: tuple[str, ...]
    processes: int = 1

    def configs(self) -> list[Any]:
        """What it describes, several for a sweep. Raises what a user sees."""
        if self.module == COMPARE:
            if self.words:
                parse_arguments(self.words)
            return []
        package = "train.__main__" if self.module == "train" else self.module
        source = importlib.import_module(package)
        entry = ENTRY.search(inspect.getsource(source))
        assert entry, f"python -m {self.module}: no such command"
        name, schema = entry[1], getattr(source, entry[2])
        words = itertools.takewhile(lambda word: word != "--cfg", self.words)
        choices = sweeps([word for word in words if word not in FLAGS])
        return [compose(name, schema, list(choice)) for choice in choices]


def assert_suits_its_route(conf: Any) -> None:
    """What a training run checks of its device before it loads a model, where it names Trainium."""
    name = conf.device.name
    if name not in INSTANCES:
        return
    device = Device(
        name=name.value,
        torch_device=torch.device("cpu"),
        dtype=torch.bfloat16,
        compiles=True,
        instance_type=INSTANCES[name],
    )
    check_run_device(conf, device)


def code(page: str) -> str:
    """What a Markdown page shows as code: fenced, indented, or between backticks in a line."""
    fenced = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    indented = [line for line in page.splitlines() if line.startswith("    ")]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page)
    return "\n".join((*fenced, *indented, *inline))


def commands(text: str) -> Iterator[Command]:
    """Every `python -m train|infer|data`, launched or not, and every Slurm job of ours."""
    text = REFUSED.sub("", re.sub(r"\\\n[\s#]*", " ", text))
    for found in LAUNCHED.finditer(text):
        processes = 1
        for name in ("nnodes", "nproc-per-node", "num_processes"):
            processes *= option(found["launcher"], name)
        yield Command(found["module"], arguments(found["rest"]), processes)
    for found in SUBMITTED.finditer(text):
        processes = option(found["launcher"], "nodes") * SLURM_PROCESSES
        yield Command("train", arguments(found["rest"]), processes)


def refusals(text: str) -> Iterator[tuple[Command, str]]:
    """Commands that are shown with their error, and what it says."""
    for command, line in REFUSED.findall(text):
        (found,) = commands(command)
        yield found, line


def option(launcher: str, name: str) -> int:
    found = re.search(rf"--{name}[= ](\d+)", launcher)
    return int(found[1]) if found else 1


def arguments(rest: str) -> tuple[str, ...]:
    """Words up to the end of the command: a comment, a redirection, another command."""
    words = []
    for word in shlex.split(rest, comments=True):
        if ENDS.match(word):
            break
        words.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return tuple(word for word in words if word != "$@")


def sweeps(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """The overrides of each job of a multirun; one job where nothing is swept over."""
    choices = [
        [f"{found.get_key_element()}={value}" for value in found.sweep_string_iterator()]
        if found.is_sweep_override()
        else [found.input_line]
        for found in OverridesParser.create().parse_overrides(overrides)
    ]
    return itertools.product(*choices)
