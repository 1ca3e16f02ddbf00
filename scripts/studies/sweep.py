"""Compare the tuner's choice with every window and a dozen trees, per draft and batch size.

    python -m scripts.studies.sweep outputs/train/demo/checkpoint outputs/train/demo-medusa/checkpoint
    python -m scripts.studies.sweep --table-only --write      writes the table to docs/tuning.md

Each draft and batch size has its own process, one after the other.
"""

import argparse
import json
import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

from infer.inputs.checkpoint_paths import run_names
from infer.report.number_format import format_estimate
from infer.results.intervals import Estimate
from models.io.pages import render_markdown_table
from scripts.benchmarks.tables import replaced
from scripts.processes import run_logged, run_side_by_side

DOC = Path(__file__).parents[2] / "docs" / "tuning.md"
CLOSE = 0.95  # of the best tokens/s
RIVALS = ["draft", "batch", "choice over the best chain", "over Medusa's 63 nodes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("outputs/sweep"))
    parser.add_argument("--table-only", action="store_true", help="print the table of an earlier sweep")
    parser.add_argument("--write", action="store_true", help="update docs/tuning.md")
    args = parser.parse_args()
    if not args.table_only:
        named = list(zip(run_names(args.checkpoints), args.checkpoints, strict=True))
        jobs = [(name, path, batch) for batch, (name, path) in product(args.batch, named)]
        run_side_by_side([partial(tune, *job, args=args) for job in jobs], jobs=1)
    files = sorted(args.output.glob("*/tune.json"))
    if not files:
        parser.error(f"--output: has no results yet, got {args.output}; leave out --table-only")
    table = tables([json.loads(file.read_text()) for file in files])
    print(table)
    if args.write:
        DOC.write_text(replaced(DOC.read_text(), "sweep", table))


def tune(name: str, checkpoint: Path, batch: int, *, args: argparse.Namespace) -> int:
    """Run one tuning process with its output in a log; return its exit code."""
    run = f"{name.replace('/', '-')}-b{batch:02}"
    place = [f"output_dir={args.output}", f"run_name={run}", "device.threads=1"]
    sweep = [f"checkpoint={checkpoint}", f"batch=[{batch}]", "sweep=true", f"num_prompts={args.prompts}"]
    code, _ = run_logged([sys.executable, "-m", "infer.tune", *sweep, *place], args.output / f"{run}.log")
    return code


def tables(runs: list[dict]) -> str:
    """Build tables of the choice against the best measured tree and against two rivals."""
    results = [(draft["name"], result) for run in runs for draft in run["drafts"] for result in draft["results"]]
    counts = {sum(1 for s in result["candidates"] if s["measured_speedup"]) for _, result in results}
    rows, rivals = [], []
    for name, result in results:
        measured = {s["name"]: s for s in result["candidates"] if s["measured_speedup"]}
        choice = measured[result["best"]]
        best = max(measured.values(), key=lambda s: s["measured_speedup"]["mean"])
        chains = [s for key, s in measured.items() if re.fullmatch(r"chain-\d+", key)]
        chain = max(chains, key=lambda s: s["measured_speedup"]["mean"])
        over = best["best_over_it"]
        high = (over["ci95"] or [over["mean"]])[-1]
        verdict = "yes" if over["mean"] >= CLOSE else "not told apart" if high >= 1 else "no"
        speeds = [f"{choice['predicted_speedup']:.2f}", shown(choice["measured_speedup"])]
        best_speed = f"{best['name']} {best['measured_speedup']['mean']:.2f}"
        start = [name, str(result["batch"])]
        rows.append([*start, result["choice"] or "none", *speeds, best_speed, shown(over), verdict])
        user_tree = measured.get("given")
        over_tree = shown(user_tree["best_over_it"]) if user_tree else "too deep for the draft"
        rivals.append([*start, f"{shown(chain['best_over_it'])} ({chain['name']})", over_tree])
    best_of = f"best of {' or '.join(map(str, sorted(counts)))}"
    columns = ["draft", "batch", "choice", "predicted", "measured", best_of, "choice over best", "within 5 %"]
    return "\n\n".join(
        render_markdown_table(*table, label_columns=len(table[0])) for table in ((columns, rows), (RIVALS, rivals))
    )


def shown(estimate: dict) -> str:
    return format_estimate(Estimate(**estimate))


if __name__ == "__main__":
    main()
