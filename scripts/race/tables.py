"""The tables of a race, computed from the files of figures that its stages have written."""

from typing import Any

import numpy as np
from numpy import ndarray

from infer.report.tables import Table
from scripts.race.runs import DEPTHS, OURS, PEER, SIDES, UNTIMED_STEPS, Race
from scripts.studies.chain_rounds import acceptance_length, render_difference, render_shares

Figures = dict[str, Any]
NAMES = {OURS: "ours", PEER: "speculators"}


def choose_rate(figures: list[Figures], side: str) -> float:
    """Return the rate of a side whose chain accepts most on the calibration prompts."""
    lengths = calibrated_lengths(figures, side)
    return max(lengths, key=lambda rate: lengths[rate])


def calibrated_lengths(figures: list[Figures], side: str) -> dict[float, float]:
    """Return tau on the calibration prompts for every rate of a side that was tried."""
    return {
        run["rate"]: acceptance_length(np.array(run["calibration"][str(DEPTHS[-1])]))
        for run in figures
        if run["side"] == side and "calibration" in run
    }


def select_chosen(figures: list[Figures], side: str) -> list[Figures]:
    """Return the runs of a side at its chosen rate, by seed."""
    if not calibrated_lengths(figures, side):
        return []
    rate = choose_rate(figures, side)
    runs = [run for run in figures if run["side"] == side and run["rate"] == rate]
    return sorted(runs, key=lambda run: run["seed"])


def pair_counts(figures: list[Figures], depth: int) -> dict[str, list[ndarray]]:
    """Return the counts by side for every seed that both sides have; they may be no seeds."""
    by_seed = {
        side: {
            run["seed"]: np.array(run["runtime"][str(depth)], dtype=np.float64)
            for run in select_chosen(figures, side)
            if "runtime" in run
        }
        for side in SIDES
    }
    seeds = sorted(by_seed[OURS].keys() & by_seed[PEER].keys())
    return {side: [by_seed[side][seed] for seed in seeds] for side in SIDES}


def build_tables(race: Race) -> list[Table]:
    """Return the tables of everything that is measured so far."""
    figures = race.list_figures()
    tables = [build_acceptance_table(figures), build_rate_table(figures), build_cost_table(race.short.list_figures())]
    return [table for table in tables if table.rows]


def build_acceptance_table(figures: list[Figures]) -> Table:
    """Return tau of both sides by depth of the chain, with the paired difference."""
    rows = []
    for depth in DEPTHS:
        counts = pair_counts(figures, depth)
        if counts[OURS]:
            totals = {side: np.sum(counts[side], axis=0) for side in SIDES}
            difference = {OURS: render_difference(totals[OURS], totals[PEER]), PEER: ""}
            rows += [
                [
                    NAMES[side],
                    str(depth),
                    ", ".join(f"{acceptance_length(c):.2f}" for c in counts[side]),
                    f"{acceptance_length(totals[side]):.2f}",
                    difference[side],
                    render_shares(totals[side]),
                ]
                for side in SIDES
            ]
    return Table(
        title="Acceptance",
        note="Tokens per round (tau) on the judged prompts, greedy; ours - speculators: over all seeds, paired by "
        "prompt, with its 95 % interval; accepted: share of all rounds that accepted at least 1, 2, ... draft tokens.",
        columns=["draft", "chain", "tau by seed", "tau", "ours - speculators", "accepted"],
        rows=rows,
        label_columns=2,
    )


def build_rate_table(figures: list[Figures]) -> Table:
    """Return how the rate of each side was chosen, and how much its runs have learned from."""
    rows = []
    for side in SIDES:
        tried, runs = calibrated_lengths(figures, side), select_chosen(figures, side)
        if runs:
            rows.append(
                [
                    NAMES[side],
                    ", ".join(f"{rate:g}: {tau:.2f}" for rate, tau in tried.items()),
                    f"{runs[0]['rate']:g}",
                    f"{runs[0]['steps']:,}",
                    ", ".join(f"{run['tokens']:,}" for run in runs),
                ]
            )
    return Table(
        title="Rates",
        note="Tau of the first seed's chain on prompts that are not judged, which chooses the "
        "rate. Tokens: of all steps, without padding, by seed.",
        columns=["trainer", "rates", "chosen", "steps", "tokens"],
        rows=rows,
        label_columns=2,
    )


def build_cost_table(figures: list[Figures]) -> Table:
    """Return the speed and the peak memory of short training runs, by seed."""
    by_side = {
        side: sorted((run for run in figures if run["side"] == side), key=lambda run: run["seed"]) for side in SIDES
    }
    rows = [
        [
            NAMES[side],
            f"{runs[0]['steps']:,}",
            ", ".join(f"{run['tokens_per_s']:,.0f}" for run in runs),
            ", ".join(f"{run['peak_bytes'] / 2**20:,.0f}" for run in runs),
        ]
        for side, runs in by_side.items()
        if runs
    ]
    return Table(
        title="Training",
        note="Runs of few steps at the chosen rates, in turns, one thread, nothing beside them, by "
        "seed; ours compiled, the peer eager, as it always is on a CPU. Tokens/s: over the time of "
        f"all steps but the first {UNTIMED_STEPS} (batches, forward and backward passes, updates; "
        "no validation, no saving), with the target's features computed before. Peak: resident "
        "memory of the process, ours with the target, its features, compiling and the final "
        "evaluation in it.",
        columns=["trainer", "steps", "tokens/s", "peak MiB"],
        rows=rows,
        label_columns=1,
    )
