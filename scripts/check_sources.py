"""Count what no linter knows in product and tests, such as vague names; fail above the bounds.

python -m scripts.check_sources
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.count_lines import PRODUCT, ROOT
from scripts.prose import FRAGMENT, PRIVATE_WORDS, is_fragment, list_private_words

VAGUE_NAMES = {"found", "some", "said", "told", "given", "one"}
MAX_LINES, MAX_FILES = 400, 12
UNFORMATTED = "# fmt" + ":"  # in two parts, so that this file has none
DRAWERS = {"utils", "util", "common", "core", "helpers", "misc"}
HARDWARE = re.compile(r"(?<![a-z])(cuda|xla|neuronx?|nccl)(?![a-z])")  # prose writes CUDA, Neuron
MAY_NAME_HARDWARE = (
    "models/device/",
    "train/device/",
    "models/parallel/processes.py",
    "train/distributed/build.py",
    "train/distributed/xla.py",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Count = tuple[str, float, float, list[str]]  # a figure with its bound, and the places that contribute to it


@dataclass(frozen=True, kw_only=True)
class Module:
    """A source file and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


def read_modules(*folders: str) -> list[Module]:
    """Return every source file of the folders, parsed."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [
        Module(path=str(file.relative_to(ROOT)), text=(text := file.read_text()), tree=ast.parse(text))
        for file in files
    ]


def count_all() -> list[Count]:
    """Return every count that has a bound."""
    modules, scripts, tests = read_modules(*PRODUCT), read_modules("scripts"), read_modules("tests")
    named, every = modules + tests, modules + scripts + tests
    functions = [place for module in modules for place in list_functions(module)]
    one_word = [place for place in functions if "_" not in place.split(" ")[1].strip("_")]
    forbidden = {
        "class names defined twice": list_doubled_classes(modules) + list_doubled_classes(tests),
        f"files of more than {MAX_LINES} lines": [m.path for m in every if len(m.text.splitlines()) > MAX_LINES],
        f"rooms of more than {MAX_FILES} files": list_crowded_rooms(every),
        "files with lines that the formatter leaves out": [m.path for m in every if UNFORMATTED in m.text],
        "files with other characters than ASCII": [m.path for m in modules + scripts if not m.text.isascii()],
        "modules and folders without a subject": [m.path for m in modules if DRAWERS & {*Path(m.path[:-3]).parts}],
        f"names of hardware outside {MAY_NAME_HARDWARE[0]}": [p for m in modules for p in list_hardware_names(m)],
        f"uses of the names {', '.join(sorted(VAGUE_NAMES))}": [p for m in named for p in list_vague_names(m)],
    }
    return [
        *((what, len(places), 0, places) for what, places in forbidden.items()),
        *count_prose(modules, of="the product"),
        *count_prose(tests, of="the tests"),
        ("% of module-level functions of one word", share(one_word, functions), 5, one_word),
    ]


def count_prose(modules: list[Module], *, of: str) -> list[Count]:
    """Return the counts of private words and of docstrings that are fragments."""
    words = [f"{m.path}:{line} {text}" for m in modules for line, text in list_private_words(m.text, m.tree)]
    thousands = sum(len(module.text.splitlines()) for module in modules) / 1000
    docstrings = [place for module in modules for place in list_docstrings(module)]
    fragments = [f"{place}: {text.splitlines()[0]}" for place, text, fragment in docstrings if fragment]
    return [
        (f"private words ({', '.join(PRIVATE_WORDS)}) in 1,000 lines of {of}", len(words) / thousands, 6, words),
        (f"% of docstrings of {of} that are fragments", share(fragments, docstrings), 3, fragments),
    ]


def share(part: list[str], total: Sequence[object]) -> float:
    """Return the size of `part` in percent of `total`."""
    return 100 * len(part) / len(total)


def list_doubled_classes(modules: list[Module]) -> list[str]:
    """List the class names with several definitions."""
    places = [
        (node.name, f"{module.path}:{node.lineno}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    counts = Counter(name for name, _ in places)
    return [f"{place} {name}" for name, place in sorted(places) if counts[name] > 1]


def list_crowded_rooms(modules: list[Module]) -> list[str]:
    """List the folders with too many files directly in them; an `__init__.py` does not count."""
    counts = Counter(str(Path(m.path).parent) for m in modules if Path(m.path).name != "__init__.py")
    return [f"{room}: {count}" for room, count in sorted(counts.items()) if count > MAX_FILES]


def list_functions(module: Module) -> Iterator[str]:
    """List module-level functions except the entry points of commands."""
    for node in module.tree.body:
        if isinstance(node, Function) and node.name != "main":
            yield f"{module.path}:{node.lineno} {node.name}"


def list_docstrings(module: Module) -> Iterator[tuple[str, str, bool]]:
    """List place and text of every docstring, and whether it is a fragment.

    That of a class or module may name its subject ("A source file and its syntax tree."), but not begin as a question.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            fragment = is_fragment(text) if isinstance(node, Function) else bool(FRAGMENT.match(text))
            yield f"{module.path}:{getattr(node, 'lineno', 1)}", text, fragment


def list_hardware_names(module: Module) -> Iterator[str]:
    """List the lines of hardware's names; a few files that the device rooms need may have them."""
    if module.path.startswith(MAY_NAME_HARDWARE):
        return
    for number, line in enumerate(module.text.splitlines(), 1):
        if HARDWARE.search(line):
            yield f"{module.path}:{number}"


def list_vague_names(module: Module) -> Iterator[str]:
    """List the places where a variable, parameter, field or function has a vague name."""
    for node in ast.walk(module.tree):
        for field in ("id", "arg", "attr", "name"):
            if (name := getattr(node, field, None)) in VAGUE_NAMES:
                yield f"{module.path}:{getattr(node, 'lineno', 0)} {name}"


def main() -> int:
    """Print each count, with `-v` also its places; return 1 if a bound is exceeded."""
    counts = count_all()
    for what, figure, bound, places in counts:
        print(f"{figure:6.1f} (at most {bound:g}) {what}")
        if figure > bound or "-v" in sys.argv:
            print("".join(f"    {place}\n" for place in places), end="")
    return int(any(figure > bound for _, figure, bound, _ in counts))


if __name__ == "__main__":
    sys.exit(main())
