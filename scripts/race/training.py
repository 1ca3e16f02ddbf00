"""Train a run of either side in a process of its own, and read what the training has cost.

Both sides count the tokens of all steps without padding, and the seconds of their training loops after the first steps,
which compile and fill caches: batches, forward and backward passes and updates, without validation and saving. Features
of the target are computed before the first step on both sides.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from models.io.errors import require
from scripts.processes import run_logged
from scripts.race.documents import ALL, ANSWERS, VOCABULARY
from scripts.race.runs import MATCHED, OURS, PEER, UNTIMED_STEPS, Run
from scripts.studies.eagle3 import SETTINGS, build_overrides

ROOT = Path(__file__).parents[2]
OUR_SETTING = SETTINGS["ours"]  # what does best in scripts/studies/eagle3.py
MASKS = {PEER: ANSWERS, MATCHED: ALL}  # what the documents let a side learn
MATCHED_SETTING = ["--ttt-steps=4"]  # ours
PEER_SETTING = """
    --speculator-type=eagle3 --hidden-states-dtype=float32 --num-workers=0 --draft-attn-impl=sdpa
    --loss-implementation=eager --on-missing=raise --log-freq=1
""".split()  # noqa: SIM905 - a list would take a line for each word
StepCost = tuple[int, float, float]  # a step, and the tokens and seconds of it, or of the steps since the last cost


def train_run(run: Run) -> int:
    """Train a run from its start and write its cost; return the exit code."""
    shutil.rmtree(run.folder, ignore_errors=True)  # what a stopped run has left
    ours = [sys.executable, "-m", "train", *our_overrides(run)]
    command = ours if run.side == OURS else peer_command(run)
    code, peak_bytes = run_logged(command, run.file.with_suffix(".log"))
    if code == 0:
        read_cost, steps = read_our_cost if run.side == OURS else read_peer_cost, run.race.steps
        costs = sum_costs(read_cost(run.folder), steps)
        run.add_figures(**run.settings, steps=steps, peak_bytes=peak_bytes, **costs)
    return code


def our_overrides(run: Run) -> list[str]:
    """Return the overrides of a run of ours."""
    overrides = build_overrides(run.folder, seed=run.seed, steps=run.race.steps, target=run.race.target)
    rates = [f"optim.lr={run.rate}", f"optim.muon_lr={run.rate}"]
    return [*overrides, *OUR_SETTING, *filter(None, [run.switch]), *rates, *run.race.overrides]


def peer_command(run: Run) -> list[str]:
    """Return the command that trains a side of the peer; it holds out the last document."""
    summary, epochs, documents = run.read_summary(), run.count_epochs(), run.race.documents(run.seed)
    count = len(summary["lengths"])
    options = {"verifier-name-or-path": run.race.target_path, "data-path": documents / MASKS[run.side]}
    options |= {f"{name}-path": file for name in VOCABULARY if (file := documents / f"{name}.npy").exists()}
    options |= {"save-path": run.folder, "seed": run.seed, "lr": run.rate, "total-seq-len": summary["step_tokens"]}
    options |= {"max-steps": run.race.steps, "epochs": epochs, "checkpoint-freq": epochs}
    options |= {"train-data-ratio": (count - 0.5) / count}
    return [
        str(find_peer() / "bin" / "python"),
        str(Path(__file__).with_name("train_speculators.py")),
        *PEER_SETTING,
        *(MATCHED_SETTING if run.side == MATCHED else []),
        *(f"--{name}={value}" for name, value in options.items()),
        "--target-layer-ids",
        *map(str, summary["layers"]),
        *filter(None, [run.switch]),
        *run.race.peer_overrides,
    ]


def find_peer() -> Path:
    """Return the peer's environment; raise UserError if there is none."""
    folder = Path(os.environ.get("SPECULATORS", ROOT / ".venv-speculators"))
    require(
        any(folder.glob(".ready-*")),
        f"SPECULATORS: must be the environment of speculators, got {folder}; run `bash scripts/setup.sh speculators`",
    )
    return folder


def sum_costs(costs: list[StepCost], steps: int) -> dict[str, float]:
    """Return the tokens of so many steps, and the speed of those after the untimed ones."""
    timed = [(tokens, seconds) for step, tokens, seconds in costs if UNTIMED_STEPS < step <= steps]
    return {
        "tokens": round(sum(tokens for step, tokens, _ in costs if step <= steps)),
        "tokens_per_s": sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed),
    }


def read_our_cost(folder: Path) -> list[StepCost]:
    """Return the cost of the steps, ten by ten, from the metrics of `python -m train`."""
    costs, tokens = [], 0.0
    for metrics in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "train/tokens" in metrics:
            spent = metrics["train/tokens"] - tokens
            tokens = metrics["train/tokens"]
            costs.append((metrics["step"], spent, spent / metrics["train/tokens_per_s"]))
    return costs


def read_peer_cost(folder: Path) -> list[StepCost]:
    """Return the cost of each step from the records of the peer's steps, which count from 0."""
    costs = []
    for record in map(json.loads, (folder / "steps.jsonl").read_text().splitlines()):
        if "profile" in record:
            seconds = record["profile"]["step_ms"] / 1000
            costs.append((record["global_step"] + 1, record["profile"]["tokens_per_s"] * seconds, seconds))
    return costs
