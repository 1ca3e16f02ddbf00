"""Find the project's own commands in scripts, manifests and pages, and compose their configurations."""

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
SLURM_PROCESSES = 64  # of a node, unless the command line sets them
INSTANCES = {DeviceName.xla: "trn1.32xlarge", DeviceName.neuron: "trn2.48xlarge"}


@dataclass(frozen=True)
class Command:
    """A command line `python -m MODULE WORDS` and the number of its processes."""

    module: str
    words: tuple[str, ...]
    processes: int = 1

    def configs(self) -> list[Any]:
        """Compose its configurations, several for a sweep. Raise the errors that a user sees."""
        if self.module == COMPARE:
            if self.words:
                parse_arguments(self.words)
            return []
        is_package = (ROOT / self.module.replace(".", "/")).is_dir()
        source = importlib.import_module(f"{self.module}.__main__" if is_package else self.module)
        entry = ENTRY.search(inspect.getsource(source))
        assert entry, f"python -m {self.module}: no such command"
        name, schema = entry[1], getattr(source, entry[2])
        words = itertools.takewhile(lambda word: word != "--cfg", self.words)
        choices = expand_sweeps([word for word in words if word not in FLAGS])
        return [compose(name, schema, list(choice)) for choice in choices]


def assert_suits_its_route(conf: Any) -> None:
    """Check the device of a training run on Trainium as the run does before it loads a model."""
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
    """Return the code of a Markdown page: fenced, indented, or between backticks in a line."""
    fenced = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    indented = [line for line in page.splitlines() if line.startswith("    ")]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page)
    return "\n".join((*fenced, *indented, *inline))


def commands(text: str) -> Iterator[Command]:
    """Yield every `python -m train|infer|data`, launched or not, and every job of our Slurm script."""
    text = REFUSED.sub("", re.sub(r"\\\n[\s#]*", " ", text))
    for match in LAUNCHED.finditer(text):
        processes = 1
        for name in ("nnodes", "nproc-per-node", "num_processes"):
            processes *= parse_option(match["launcher"], name)
        yield Command(match["module"], split_arguments(match["rest"]), processes)
    for match in SUBMITTED.finditer(text):
        processes = parse_option(match["launcher"], "nodes") * SLURM_PROCESSES
        yield Command("train", split_arguments(match["rest"]), processes)


def refusals(text: str) -> Iterator[tuple[Command, str]]:
    """Yield each command that is shown with its error, and the text of the error."""
    for command, line in REFUSED.findall(text):
        (parsed,) = commands(command)
        yield parsed, line


def parse_option(launcher: str, name: str) -> int:
    match = re.search(rf"--{name}[= ](\d+)", launcher)
    return int(match[1]) if match else 1


def split_arguments(rest: str) -> tuple[str, ...]:
    """Return the words before the end of the command: a comment, a redirection, another command."""
    words = []
    for word in shlex.split(rest, comments=True):
        if ENDS.match(word):
            break
        words.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return tuple(word for word in words if word != "$@")


def expand_sweeps(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each job of a multirun; without a sweep there is a single job."""
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line]
        for override in OverridesParser.create().parse_overrides(overrides)
    ]
    return itertools.product(*choices)
