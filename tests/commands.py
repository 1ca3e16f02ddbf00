"""The project's own commands as they stand in scripts, manifests and pages, found and composed."""

import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.entry import compose

ROOT = Path(__file__).parent.parent
MODULE = r"-m (?P<module>(?:train|infer|data)(?:\.\w+)*)(?=[\s`)]|$)"
LAUNCHED = re.compile(
    rf"\b(?:python3?|torchrun|accelerate launch)\b[^\n#;|]*? {MODULE}(?P<rest>[^\n`]*)"
)
REFUSED = re.compile(r"\$ (python [^\n]*)\n\s*error: ([^\n]*)")
ENTRY = re.compile(r'@entry_point\("(\w+)", (\w+)\)')
ENDS = re.compile(r"&&?$|\|\|?$|;$|\d?[<>]")
FLAGS = {"-m", "--multirun", "--help"}  # of Hydra; --cfg takes a value
TWO_FILES = {"infer.compare"}  # takes paths, no config


def blocks(page: str) -> str:
    """The code of a Markdown page: fenced, indented, or between backticks in a line."""
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", page, re.DOTALL))
    indented = "\n".join(line for line in page.splitlines() if line.startswith("    "))
    inline = "\n".join(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page))
    return "\n".join((fenced, indented, inline))


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Module and arguments of every `python -m train|infer|data`, launched or not."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for found in LAUNCHED.finditer(REFUSED.sub("", joined)):
        yield found["module"], arguments(found["rest"])


def refusals(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Commands that are shown with their error: module, arguments, what is printed."""
    for command, line in REFUSED.findall(text):
        (found,) = commands(command)
        yield *found, line


def arguments(rest: str) -> list[str]:
    """Words up to the end of the command: a comment, a redirection, another command."""
    words = []
    for word in shlex.split(rest, comments=True):
        if ENDS.match(word):
            break
        words.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return [word for word in words if word != "$@"]


def compose_all(module: str, words: list[str]) -> list[object]:
    """The configs that a command line describes, several for a sweep. Raises what a user sees."""
    if module in TWO_FILES:
        assert len(words) in (0, 2), f"{module} takes two reports, got {words}"
        return []
    source = importlib.import_module(f"{module}.__main__" if module == "train" else module)
    entry = ENTRY.search(inspect.getsource(source))
    assert entry, f"python -m {module}: no such command"
    name, schema = entry[1], getattr(source, entry[2])
    if "--cfg" in words:
        words = words[: words.index("--cfg")]
    overrides = [word for word in words if word not in FLAGS]
    return [compose(name, schema, list(choice)) for choice in sweeps(overrides)]


def sweeps(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line]
        for o in parsed
    ]
    return itertools.product(*choices)
