"""Compare locks/ with pyproject.toml, with the installed versions and with the last tests.

python scripts/check_locks.py               fail if a lock does not fit or dev.txt is untested
python scripts/check_locks.py note-tested   after passed tests, by their Python: note dev.txt
"""

import hashlib
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("dev", "engines", "floor", "neuron", "speculators", "transformers4", "xla")
NEURON_IMAGE = ("torch", "torch-neuronx", "libneuronxla")  # their versions are AWS's


def read_requirements(root: Path, name: str) -> list[Requirement]:
    """Return what a lock must have: packages of pyproject.toml and of locks/NAME.in."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    project, dev = pyproject["project"], pyproject["dependency-groups"]["dev"]
    ours = project["dependencies"]
    lines = {
        "dev": ours + dev,
        "floor": ours + dev,
        "neuron": [line for line in ours if Requirement(line).name not in NEURON_IMAGE],
        "xla": ours + project["optional-dependencies"]["xla"],
    }.get(name, [])
    asked = root / f"locks/{name}.in"
    return [Requirement(line) for line in lines + (read_lines(asked) if asked.exists() else [])]


def read_lock(root: Path, name: str) -> list[Requirement]:
    """Return the pins of locks/NAME.txt; one package may have several, for several platforms."""
    return [Requirement(line) for line in read_lines(root / f"locks/{name}.txt")]


def read_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def list_misfits(root: Path, name: str) -> Iterator[str]:
    """List the requirements that a lock leaves out or does not meet."""
    pins: dict[str, list[str]] = {}
    for pin in read_lock(root, name):
        (specifier,) = pin.specifier
        pins.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    for asked in read_requirements(root, name):
        versions = pins.get(canonicalize_name(asked.name), [])
        if not versions or not all(asked.specifier.contains(v, prereleases=True) for v in versions):
            yield (
                f"error: locks/{name}.txt: must have {asked.name} {asked.specifier}, "
                f"got {', '.join(versions) or 'none'}; run make lock"
            )


def list_other_versions(root: Path) -> list[str]:
    """List the installed packages whose version is not dev.txt's; X+cpu is the lock's X."""
    others = []
    for pin in read_lock(root, "dev"):
        try:
            installed = version(pin.name)
        except PackageNotFoundError:  # CUDA's libraries, beside a CPU build
            continue
        if (not pin.marker or pin.marker.evaluate()) and not pin.specifier.contains(installed):
            others.append(f"{pin.name} {installed}")
    return others


def hash_lock(root: Path) -> str:
    """Return the line of locks/tested.txt for the present dev.txt, in the form of sha256sum."""
    file = root / "locks/dev.txt"
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}  locks/dev.txt\n"


def check_locks(root: Path) -> list[str]:
    """Return a line for each misfit of a lock, and one if dev.txt is not noted as tested."""
    problems = [problem for name in LOCKS for problem in list_misfits(root, name)]
    tested = root / "locks/tested.txt"
    if not tested.exists() or tested.read_text() != hash_lock(root):
        problems.append(
            "error: locks/tested.txt: must have the hash of locks/dev.txt, got another or none; "
            "run make test, which notes it after a pass"
        )
    return problems


def note_tested(root: Path) -> str | None:
    """Note dev.txt as tested, unless other versions are installed; then return a line."""
    if others := list_other_versions(root):
        return f"locks/dev.txt is not noted as tested, installed are {', '.join(others)}"
    tested = root / "locks/tested.txt"
    if not tested.exists() or tested.read_text() != hash_lock(root):
        tested.write_text(hash_lock(root))
    return None


def main(arguments: list[str]) -> int:
    """Return 1 if a lock does not fit or was not tested."""
    if arguments == ["note-tested"]:
        if line := note_tested(ROOT):
            print(line)
        return 0
    problems = check_locks(ROOT)
    print("\n".join(problems) if problems else f"{len(LOCKS)} locks fit pyproject.toml")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
