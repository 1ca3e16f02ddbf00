"""The newest versions of all dependencies, for `make test-newest`.

python scripts/newest.py requirements        print the requirements without upper bounds
python scripts/newest.py note RESULT [none]  write versions and RESULT to docs/status.md
"""

import platform
import re
import sys
import tomllib
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UPPER = re.compile(r",<[\w.]+|<[\w.]+,?")
MAIN = ("torch", "transformers", "accelerate", "datasets", "hydra-core", "omegaconf", "peft", "numpy")


def lift_bounds(pyproject: dict) -> list[str]:
    """Return what the project and its tests need, without upper bounds."""
    requirements = [*pyproject["project"]["dependencies"], *pyproject["dependency-groups"]["dev"]]
    return [UPPER.sub("", requirement) for requirement in requirements]


def note_result(page: str, result: str, bounds: str, versions: dict[str, str], where: str) -> str:
    """Return the page with the row of these bounds (kept or none) replaced by a result."""
    subject = "newest versions of all" if bounds == "none" else "newest versions within the bounds"
    listed = ", ".join(f"{name} {installed}" for name, installed in versions.items())
    command = "make test-newest" + (" BOUNDS=none" if bounds == "none" else "")
    row = f"| the {subject}: {listed} | {where}: **{result}** | `{command}` |"
    page, rows = re.subn(rf"^\| the {subject}: .*$", lambda _: row, page, flags=re.MULTILINE)
    if rows != 1:
        raise ValueError(f"docs/status.md must have one row of the {subject}, got {rows}")
    return page


def main(arguments: list[str]) -> None:
    """Print the requirements, or note a result."""
    if arguments == ["requirements"]:
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
        print("\n".join(lift_bounds(pyproject)))
        return
    _, result, bounds = [*arguments, "kept"][:3]
    versions = {name: version(name) for name in MAIN}
    python, machine = platform.python_version(), f"{platform.system()} {platform.machine()}"
    where = f"CPU, Python {python}, {machine}, {date.today()}"
    page = ROOT / "docs/status.md"
    page.write_text(note_result(page.read_text(), result, bounds, versions, where))


if __name__ == "__main__":
    main(sys.argv[1:])
