"""Print every lower bound of pyproject.toml as a pin for pip.

python scripts/lower_bounds.py [PACKAGE...]      default: all packages
"""

import re
import sys
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<version>[\w.]+)")


def lower_bounds(pyproject: dict) -> dict[str, str]:
    """Return the lowest allowed version of each package that the project and its tests need."""
    requirements = [*pyproject["project"]["dependencies"], *pyproject["dependency-groups"]["dev"]]
    matches = [BOUND.match(requirement) for requirement in requirements]
    return {match["name"]: match["version"] for match in matches if match}


def main(names: list[str]) -> None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    bounds = lower_bounds(tomllib.loads(pyproject.read_text()))
    for name in names or bounds:
        print(f"{name}=={bounds[name]}")


if __name__ == "__main__":
    main(sys.argv[1:])
