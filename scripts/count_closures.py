"""Count the files that one must be able to read to follow a part of the product.

python -m scripts.count_closures [--files]    # fails above the bounds

A closure is a file with everything that it imports, in functions and for type checkers too. When a module is imported,
the `__init__.py` of its package counts if it holds code. Lines are those of scripts/count_lines.py, without formatting.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.count_lines import PRODUCT, ROOT, count_code_lines

# name -> the files it begins with, and the most files and lines that it may have
CLOSURES: dict[str, tuple[list[str], int, int | None]] = {
    "engine": (["infer/engine/decode.py"], 32, 4000),
    "losses": (["models/losses/token_losses.py"], 5, None),
    "EAGLE-3": (["models/drafts/eagle3.py"], 35, None),
}


def list_imports(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, as dotted names from the root, modules or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_files(name: str) -> Iterator[Path]:
    """Yield the files of the product that run when a dotted name is imported."""
    parts = name.split(".")
    if parts[0] not in PRODUCT:
        return
    for end in range(1, len(parts) + 1):
        base = ROOT.joinpath(*parts[:end])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.exists() and holds_code(path):
                yield path


def holds_code(path: Path) -> bool:
    """Return whether a file has more than a docstring."""
    tree = ast.parse(path.read_text())
    return len(tree.body) > (ast.get_docstring(tree) is not None)


def find_closure(files: list[str]) -> set[Path]:
    """Return the files and all that they import, directly or not."""
    waiting, closure = [ROOT / file for file in files], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in closure:
            closure.add(path)
            waiting += [file for name in list_imports(path) for file in find_files(name)]
    return closure


def main() -> None:
    above = []
    for name, (files, most_files, most_lines) in CLOSURES.items():
        closure = find_closure(files)
        lines = {path: count_code_lines(path.read_text()) for path in closure}
        total = sum(lines.values())
        bounds = f"{most_files} files" + (f", {most_lines:,} lines" if most_lines else "")
        print(f"{name}: {len(closure)} files, {total:,} lines; at most {bounds}")
        if "--files" in sys.argv:
            for path in sorted(closure):
                print(f"    {lines[path]:>5} {path.relative_to(ROOT)}")
        if len(closure) > most_files or (most_lines and total > most_lines):
            above.append(name)
    sys.exit(f"above the bounds: {', '.join(above)}" if above else 0)


if __name__ == "__main__":
    main()
