"""Count lines of code, formatted at one width and without blank lines and comments.

python -m scripts.count_lines [FOLDER]    # of another checkout
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("conf", "data", "infer", "models", "train")
GROUPS = {"product": PRODUCT, "product and scripts": (*PRODUCT, "scripts"), "tests": ("tests",)}
WIDTH = 120
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code_lines(text: str) -> int:
    """Return the lines that hold code or a docstring.

    >>> count_code_lines('''x = 1  # a comment
    ...
    ... # another
    ... y = (
    ...     2
    ... )
    ... ''')
    4
    """
    lines = text.splitlines()
    numbers = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NOT_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    return sum(bool(lines[number - 1].strip()) for number in numbers)


def count_groups(root: Path) -> dict[str, int]:
    """Return the lines of each group of a checkout's folders."""
    with tempfile.TemporaryDirectory() as folder:
        for name in {name for names in GROUPS.values() for name in names}:
            shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("*.pyc"))
        for path in Path(folder).rglob("*.py"):
            path.write_text(path.read_text().replace("# fmt" + ": skip", ""))
        ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--quiet"]
        options = [f"--line-length={WIDTH}", "--config=format.skip-magic-trailing-comma=true"]
        subprocess.run([*ruff, *options, folder], check=True)
        return {
            group: sum(
                count_code_lines(path.read_text()) for name in names for path in Path(folder, name).rglob("*.py")
            )
            for group, names in GROUPS.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    for group, count in count_groups(parser.parse_args().folder).items():
        print(f"{count:>7,} {group}")


if __name__ == "__main__":
    main()
