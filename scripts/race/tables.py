"""The tables of a race, computed from the files of figures that its stages have written."""

from typing import Any

import numpy as np
from numpy import ndarray

from infer.report.tables import Table
from scripts.race.runs import DEPTHS, MATCHED, OURS, PEER, SIDES, UNTIMED_STEPS, Race
from scripts.studies.chain_rounds import acceptance_length, render_difference, render_shares

Figures = dict[str, Any]
Setting = tuple[str, float]  # a switch and a rate
NAMES = {OURS: "ours", PEER: "speculators", MATCHED: "speculators, our mask and steps"}


def choose_setting(figures: list[Figures], side: str) -> Setting:
    """Return the setting of a side whose chain accepts most on the calibration prompts."""
    lengths = calibrated_lengths(figures, side)
    return max(lengths, key=lambda setting: lengths[setting])


def calibrated_lengths(figures: list[Figures], side: str) -> dict[Setting, float]:
    """Return tau on the calibration prompts for every setting of a side that was tried."""
    return {
        (run["switch"], run["rate"]): acceptance_length(np.array(run["calibration"][str(DEPTHS[-1])]))
        for run in figures
        if run["side"] == side and "calibration" in run
    }


def select_chosen(figures: list[Figures], side: str) -> list[Figures]:
    """Return the runs of a side with its chosen setting, by seed."""
    if not calibrated_lengths(figures, side):
        return []
    setting = choose_setting(figures, side)
    return [run for run in figures if run["side"] == side and (run["switch"], run["rate"]) == setting]


def pair_counts(figures: list[Figures], depth: int) -> dict[str, list[ndarray]]:
    """Return the counts by side for every seed that all sides have; they may be no seeds."""
    by_seed = {
        side: {
            run["seed"]: np.array(run["runtime"][str(depth)], dtype=np.float64)
            for run in select_chosen(figures, side)
            if "runtime" in run
        }
        for side in SIDES
    }
    seeds = sorted(set.intersection(*(set(counts) for counts in by_seed.values())))
    return {side: [by_seed[side][seed] for seed in seeds] for side in SIDES}


def build_tables(race: Race) -> list[Table]:
    """Return the tables of everything that is measured so far."""
    figures = race.list_figures()
    tables = [build_acceptance_table(figures), build_rate_table(figures), build_cost_table(race.short.list_figures())]
    return [table for table in tables if table.rows]


def build_acceptance_table(figures: list[Figures]) -> Table:
    """Return tau of all sides by depth of the chain, with our paired difference to each."""
    rows = []
    for depth in DEPTHS:
        counts = pair_counts(figures, depth)
        if counts[OURS]:
            rows += [
                [
                    NAMES[side],
                    str(depth),
                    ", ".join(f"{acceptance_length(c):.2f}" for c in counts[side]),
                    f"{acceptance_length(np.sum(counts[side], axis=0)):.2f}",
                    "" if side == OURS else render_difference(counts[OURS], counts[side]),
                    render_shares(np.sum(counts[side], axis=0)),
                ]
                for side in SIDES
            ]
    return Table(
        title="Acceptance",
        note="Tokens per round (tau) on the judged prompts, greedy; ours - this: with its 95 % interval, of the noise "
        "between prompts, which are paired, and between seeds; accepted: share of all rounds that accepted at least 1, "
        "2, ... draft tokens.",
        columns=["draft", "chain", "tau by seed", "tau", "ours - this", "accepted"],
        rows=rows,
        label_columns=2,
    )


def build_rate_table(figures: list[Figures]) -> Table:
    """Return how the setting of each side was chosen, and how much its runs have read."""
    rows = []
    for side in SIDES:
        tried, runs = calibrated_lengths(figures, side), select_chosen(figures, side)
        if runs:
            rows.append(
                [
                    NAMES[side],
                    ", ".join(f"{name_setting(setting)}: {tau:.2f}" for setting, tau in tried.items()),
                    name_setting((runs[0]["switch"], runs[0]["rate"])),
                    f"{runs[0]['steps']:,}",
                    ", ".join(f"{run['tokens']:,}" for run in runs),
                ]
            )
    return Table(
        title="Settings",
        note="Tau of the first seed's chain of four on prompts that are neither judged nor trained on, which chooses "
        "the setting. Tokens: of all steps, without padding, by seed.",
        columns=["trainer", "settings", "chosen", "steps", "tokens"],
        rows=rows,
        label_columns=3,
    )


def name_setting(setting: Setting) -> str:
    switch, rate = setting
    return f"{switch} {rate:g}".lstrip()


def build_cost_table(figures: list[Figures]) -> Table:
    """Return the speed and the peak memory of short training runs, by seed."""
    by_side = {side: [run for run in figures if run["side"] == side] for side in SIDES}
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
