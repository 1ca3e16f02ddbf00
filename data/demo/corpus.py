"""The demo's text: source code and documentation of the standard library that every Python carries.

Nothing of it is committed. A file is held out by a hash of its name, so every interpreter splits
its library alike; tests serve training only, and may be missing (Debian ships none).
"""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
HELD_OUT_SHARE = 16  # one module in so many is never trained on
MAX_FILE_BYTES = 400_000  # larger ones are tables, not prose or code
SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "encodings", "ensurepip", "idlelib",
    "lib2to3", "lib-dynload", "msilib", "pydoc_data", "turtledemo",
}  # fmt: skip
TEST_FOLDERS = {"test", "tests"}
BUILD_FILES = ("_sysconfigdata", "config-")  # written when the interpreter was built


def is_held_out(name: str) -> bool:
    """Whether a module ("json/decoder.py") or a documentation topic ("topics/with") is held out."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def training_texts(kind: str, library: Path = LIBRARY) -> tuple[str, ...]:
    """Texts to learn from; `kind` is "code", "docs" or "tests" (maybe none)."""
    return _tests(library) if kind == "tests" else _texts(kind, held_out=False, library=library)


def held_out_texts(kind: str, library: Path = LIBRARY) -> tuple[str, ...]:
    """Texts of the modules and topics that training never sees; `kind` is "code" or "docs"."""
    return _texts(kind, held_out=True, library=library)


@cache
def _texts(kind: str, *, held_out: bool, library: Path) -> tuple[str, ...]:
    if kind == "code":
        paths = modules_by_name(library).items()
        texts = [_read(path) for name, path in paths if is_held_out(name) == held_out]
        return tuple(text for text in texts if text)
    modules = _texts("code", held_out=held_out, library=library)
    topics = [text for name, text in _topics() if is_held_out(name) == held_out]
    return (*(text for module in modules for text in docstrings(module)), *topics)


def docstrings(source: str) -> Iterator[str]:
    """Each documented definition as its dotted name, its arguments and its docstring."""
    tree = ast.parse(source)
    if text := ast.get_docstring(tree):
        yield text + "\n"
    yield from _definitions(tree, prefix="")


def _definitions(parent: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = prefix + node.name
            args = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            if text := ast.get_docstring(node):
                yield f"{name}{args}\n\n{text}\n"
            yield from _definitions(node, prefix=name + ".")


def modules_by_name(library: Path = LIBRARY) -> dict[str, Path]:
    """The library's modules without its tests, by relative name ("json/decoder.py")."""
    return {
        name: path
        for name, path in _files(library)
        if TEST_FOLDERS.isdisjoint(name.split("/")) and not name.startswith(BUILD_FILES)
    }


def _tests(library: Path) -> tuple[str, ...]:
    """Test files, but for those named after a held-out module."""
    unseen = {f"test_{Path(name).stem}" for name in modules_by_name(library) if is_held_out(name)}
    paths = [
        path
        for name, path in _files(library)
        if not TEST_FOLDERS.isdisjoint(name.split("/")) and path.stem not in unseen
    ]
    return tuple(text for path in paths if (text := _read(path)))


def _files(library: Path) -> Iterator[tuple[str, Path]]:
    found = []
    for folder, inner, names in os.walk(library):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # the others' are many
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(found):
        yield path.relative_to(library).as_posix(), path


def _read(path: Path) -> str | None:
    """The text of a file, or None where there is none to learn from (tests hold odd encodings)."""
    raw = path.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if len(raw) <= MAX_FILE_BYTES else None


def _topics() -> Iterator[tuple[str, str]]:
    """Chapters of the language reference, which `help("with")` prints."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name].strip() + "\n"
