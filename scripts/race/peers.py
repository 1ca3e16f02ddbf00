"""Race our EAGLE-3 against that of speculators: equal answers and steps, several rates and switches.

    bash scripts/setup.sh speculators
    python -m scripts.race.peers --output outputs/race
    python -m scripts.race.peers --target outputs/wide --output outputs/race-wide --write

Both trainers get the same answers of the same target. The peer runs twice: as it is, and with our mask and our steps of
unroll. Each side chooses its switch and its rate with the first seed, by a chain of four on prompts that are neither
judged nor trained on (`--calibration`, by default the demo's); the other seeds train with these. The judged prompts are
the demo's held-out ones or those of `--prompts`. Every run and measurement is a process on one thread; what is finished
is not repeated, so a stopped race goes on where it was. At the end short runs of all sides take turns, alone, to tell
what training costs.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.io.errors import UserError, require
from scripts.benchmarks.tables import PAGE, machine, publish
from scripts.processes import run_logged, run_side_by_side
from scripts.race.documents import SUMMARY
from scripts.race.runs import OURS, SIDES, Race, Run
from scripts.race.tables import build_tables, choose_setting
from scripts.race.training import find_peer, train_run
from scripts.studies.chain_rounds import name_target

RATES = [3e-3, 1e-2, 3e-2]
SWITCHES = ["draft.dropout=0", "draft.dropout=0.1"]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    try:
        if args.table:
            race = Race.load(args.output)
        else:
            settings = {name: value for name, value in vars(args).items() if name in Race.__dataclass_fields__}
            race = Race(**settings)
            race.save()
        name = name_target(race.target)
        require(
            not args.write or f"<!-- race-{name} -->" in PAGE.read_text(),
            f"--write: must be for a target with markers in {PAGE.name}, got {name}; leave it out",
        )
        if not args.table:
            hold_race(race, args)
    except UserError as error:
        sys.exit(f"error: {error}")
    setting = f"target `{name}`, {machine(open_device(DeviceConf(name=DeviceName.cpu, compile=False)))}"
    publish(f"race-{name}", *build_tables(race), setting=setting, should_write=args.write)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="a directory; by default the demo's target")
    parser.add_argument("--prompts", help="a file of judged prompts; by default the demo's")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--calibration", help="a file of prompts that choose; by default the demo's")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="that every side tries")
    parser.add_argument("--switches", nargs="+", default=SWITCHES, help="of `python -m train`, that ours tries")
    parser.add_argument("--overrides", nargs="*", default=[], help="of `python -m train`")
    parser.add_argument("--peer-switches", nargs="+", default=[""], help="of `speculators train`, that the peer tries")
    parser.add_argument("--peer-overrides", nargs="*", default=[], help="of `speculators train`")
    parser.add_argument("--output", type=Path, default=Path("outputs/race"))
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--table", action="store_true", help="only print what is measured already")
    parser.add_argument("--write", action="store_true", help="update docs/benchmarks.md")
    return parser.parse_args()


def hold_race(race: Race, args: argparse.Namespace) -> None:
    """Train and measure everything that is not finished yet."""
    find_peer()
    trials = [
        Run(race=race, side=side, switch=switch, rate=rate, seed=args.seeds[0])
        for side in SIDES
        for switch, rate in product(args.switches if side == OURS else args.peer_switches, args.rates)
    ]
    train_all(trials, args.jobs)
    measure_all("calibration", trials, args.jobs)
    figures = race.list_figures()
    settings = {side: choose_setting(figures, side) for side in SIDES}
    chosen = [
        Run(race=race, side=side, switch=switch, rate=rate, seed=seed)
        for seed in args.seeds
        for side, (switch, rate) in settings.items()
    ]
    train_all(chosen, args.jobs)
    measure_all("runtime", chosen, args.jobs)
    race.share_documents()
    # These are timed, so nothing runs beside them.
    train_all([replace(run, race=race.short) for run in chosen], jobs=1)


def train_all(runs: list[Run], jobs: int) -> None:
    """Write the documents of the runs' seeds, then train the runs."""
    by_seed = {run.seed: run for run in runs if run.side == OURS}
    missing = [run for seed, run in by_seed.items() if not (run.race.documents(seed) / SUMMARY).exists()]
    run_side_by_side((partial(do_stage, "documents", run) for run in missing), jobs)
    run_side_by_side((partial(train_run, run) for run in runs if not run.figures), jobs)


def measure_all(stage: str, runs: list[Run], jobs: int) -> None:
    """Measure every run whose figures lack the stage."""
    run_side_by_side((partial(do_stage, stage, run) for run in runs if stage not in run.figures), jobs)


def do_stage(stage: str, run: Run) -> int:
    """Do a stage in a process of its own; return the exit code."""
    options = [f"--{name}={value}" for name, value in run.settings.items()]
    command = [sys.executable, "-m", "scripts.race.stage", str(run.race.output), stage, *options]
    code, _ = run_logged(command, run.file.with_suffix(f".{stage}.log"))
    return code


if __name__ == "__main__":
    main()
