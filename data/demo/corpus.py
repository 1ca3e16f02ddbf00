"""Read the demo's text: source code and documentation of Python's standard library.

None of it is committed. A hash of its name decides whether a file is held out, so the split is the
same for every interpreter. The library's tests are used only by the recipe of the demo target.
"""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
HELD_OUT_SHARE = 16  # 1 in 16 modules is held out from training
MAX_FILE_BYTES = 400_000  # larger ones are tables, not prose or code
SKIPPED_FOLDERS = """
    __pycache__ site-packages dist-packages encodings ensurepip idlelib lib2to3 lib-dynload msilib pydoc_data turtledemo
""".split()  # noqa: SIM905 - a list would take a line for each name
TEST_FOLDERS = {"test", "tests"}
BUILD_FILES = ("_sysconfigdata", "config-")  # written when the interpreter was built


def is_held_out(name: str) -> bool:
    """Return whether a module ("json/decoder.py") or a topic ("topics/with") is held out."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


@cache
def library_texts(kind: str, *, held_out: bool) -> tuple[str, ...]:
    """Return the texts of a kind, "code" or "docs", that are held out, or those to train on."""
    if kind == "code":
        paths = modules_by_name(LIBRARY).items()
        texts = [read_source(path) for name, path in paths if is_held_out(name) == held_out]
        return tuple(text for text in texts if text)
    from pydoc_data.topics import topics

    modules = library_texts("code", held_out=held_out)
    # Chapters of the language reference, which calls such as `help("with")` print.
    chapters = [topics[name].strip() + "\n" for name in sorted(topics) if is_held_out(f"topics/{name}") == held_out]
    return (*(text for module in modules for text in extract_docstrings(module)), *chapters)


def extract_docstrings(source: str) -> Iterator[str]:
    """Yield the module's docstring, then name, arguments and docstring of each definition."""
    tree = ast.parse(source)
    if text := ast.get_docstring(tree):
        yield text + "\n"
    yield from _extract_definitions(tree, prefix="")


def _extract_definitions(parent: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = prefix + node.name
            args = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            if text := ast.get_docstring(node):
                yield f"{name}{args}\n\n{text}\n"
            yield from _extract_definitions(node, prefix=name + ".")


def modules_by_name(library: Path = LIBRARY) -> dict[str, Path]:
    """Return the paths of the library's modules, without tests, by name ("json/decoder.py")."""
    return {
        name: path
        for name, path in list_python_files(library)
        if TEST_FOLDERS.isdisjoint(name.split("/")) and not name.startswith(BUILD_FILES)
    }


def list_python_files(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of every Python file of a library, tests included."""
    paths = []
    for folder, subfolders, names in os.walk(library):
        # In place, so that os.walk does not enter them; site-packages may hold many files.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from ((path.relative_to(library).as_posix(), path) for path in sorted(paths))


def read_source(path: Path) -> str | None:
    """Read a file; return None if it is not UTF-8, as some tests are, or too large."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
