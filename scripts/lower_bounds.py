"""Print every lower bound of pyproject.toml as a pin, so that pip installs what the bounds promise.

python scripts/lower_bounds.py [PACKAGE...]      all packages, or those named
"""

import re
import sys
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<version>[\w.]+)")


def lower_bounds(pyproject: dict) -> dict[str, str]:
    """Map each package that the project and its tests need to its lowest allowed version."""
    wanted = [*pyproject["project"]["dependencies"], *pyproject["dependency-groups"]["dev"]]
    bounds = [BOUND.match(requirement) for requirement in wanted]
    return {bound["name"]: bound["version"] for bound in bounds if bound}


def main(names: list[str]) -> None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    bounds = lower_bounds(tomllib.loads(pyproject.read_text()))
    for name in names or bounds:
        print(f"{name}=={bounds[name]}")


if __name__ == "__main__":
    main(sys.argv[1:])
