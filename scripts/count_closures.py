"""Count the files that one must be able to read to follow a part of the product.

python -m scripts.count_closures [--files]    # fails above the bounds

A closure is a module with everything that it imports, in functions and for type checkers too. Lines are those of
scripts/count_lines.py, without formatting.
"""

import sys

import grimp

from scripts.count_lines import PRODUCT, ROOT, count_code_lines

# name -> the module it begins with, and the most files and lines that it may have
CLOSURES: dict[str, tuple[str, int, int | None]] = {
    "engine": ("infer.engine.decode", 32, 4000),
    "losses": ("models.losses.token_losses", 5, None),
    "EAGLE-3": ("models.drafts.eagle3", 35, None),
}


def main() -> None:
    graph, above = grimp.build_graph(*PRODUCT, cache_dir=None), []
    for name, (start, most_files, most_lines) in CLOSURES.items():
        files = sorted(f"{module.replace('.', '/')}.py" for module in {start, *graph.find_upstream_modules(start)})
        lines = {file: count_code_lines((ROOT / file).read_text()) for file in files}
        total = sum(lines.values())
        bounds = f"{most_files} files" + (f", {most_lines:,} lines" if most_lines else "")
        print(f"{name}: {len(files)} files, {total:,} lines; at most {bounds}")
        if "--files" in sys.argv:
            for file in files:
                print(f"    {lines[file]:>5} {file}")
        if len(files) > most_files or (most_lines and total > most_lines):
            above.append(name)
    sys.exit(f"above the bounds: {', '.join(above)}" if above else 0)


if __name__ == "__main__":
    main()
