"""The tables of a race, computed from the files of figures that its stages have written."""

import json
from typing import Any

import numpy as np
from numpy import ndarray

from infer.report.tables import Table
from scripts.race.runs import DEPTHS, LOOKUP_FILE, OURS, PEER, SIDES, UNTIMED_STEPS, Race
from scripts.studies.chain_rounds import acceptance_length, render_difference, render_shares

Figures = dict[str, Any]
NAMES = {OURS: "ours", PEER: "speculators"}
ENGINES = {"runtime": "this runtime", "vllm": "vLLM"}


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


def pair_counts(figures: list[Figures], engine: str, depth: int) -> dict[str, list[ndarray]]:
    """Return the counts by side for every seed that both sides have; they may be no seeds."""
    by_seed = {
        side: {
            run["seed"]: np.array(run[engine][str(depth)], dtype=np.float64)
            for run in select_chosen(figures, side)
            if engine in run
        }
        for side in SIDES
    }
    seeds = sorted(by_seed[OURS].keys() & by_seed[PEER].keys())
    return {side: [by_seed[side][seed] for seed in seeds] for side in SIDES}


def build_tables(race: Race) -> list[Table]:
    """Return the tables of everything that is measured so far."""
    figures, file = race.list_figures(), race.output / LOOKUP_FILE
    lookup = json.loads(file.read_text()) if file.exists() else None
    tables = [
        build_acceptance_table(figures, lookup),
        build_category_table(figures, lookup),
        build_rate_table(figures),
        build_cost_table(race.short.list_figures()),
    ]
    return [table for table in tables if table.rows]


def build_acceptance_table(figures: list[Figures], lookup: Figures | None) -> Table:
    """Return tau of both sides by engine and depth of the chain, with the paired difference."""
    rows = []
    for engine in ENGINES:
        for depth in DEPTHS:
            counts = pair_counts(figures, engine, depth)
            if counts[OURS]:
                totals = {side: np.sum(counts[side], axis=0) for side in SIDES}
                difference = {OURS: render_difference(totals[OURS], totals[PEER]), PEER: ""}
                rows += [
                    [
                        NAMES[side],
                        ENGINES[engine],
                        str(depth),
                        ", ".join(f"{acceptance_length(c):.2f}" for c in counts[side]),
                        f"{acceptance_length(totals[side]):.2f}",
                        difference[side],
                        render_shares(totals[side]),
                    ]
                    for side in SIDES
                ]
    if lookup:
        length = acceptance_length(np.array(lookup["counts"]))
        rows.append(["prompt lookup", "transformers", "", "", f"{length:.2f}", "", ""])
    versions = {run["vllm_version"] for run in figures if "vllm_version" in run}
    return Table(
        title="Acceptance",
        note="Tokens per round (tau) on the judged prompts, greedy; ours - speculators: over all "
        "seeds, paired by prompt, with its 95 % interval; accepted: share of all rounds that "
        "accepted at least 1, 2, ... draft tokens; prompt lookup: tokens per forward pass."
        + "".join(f" vLLM {version}." for version in sorted(versions)),
        columns=["draft", "decoded by", "chain", "tau by seed", "tau", "ours - speculators", "accepted"],
        rows=rows,
        label_columns=3,
    )


def build_category_table(figures: list[Figures], lookup: Figures | None) -> Table:
    """Return tau of the deepest chain in this runtime by the prompts' category."""
    counts = {
        NAMES[side]: np.sum(by_seed, axis=0)
        for side, by_seed in pair_counts(figures, "runtime", DEPTHS[-1]).items()
        if by_seed
    }
    categories = np.array(lookup["categories"] if lookup else [])
    if lookup:
        counts["prompt lookup"] = np.array(lookup["counts"])
    names = list(dict.fromkeys(categories.tolist()))
    rows = [
        [draft, *(f"{acceptance_length(c[categories == name]):.2f}" for name in names)] for draft, c in counts.items()
    ]
    return Table(
        title="Acceptance by category",
        note=f"Tau of a chain of {DEPTHS[-1]} in this runtime over all seeds; prompt lookup: tokens per forward pass.",
        columns=["draft", *names],
        rows=rows if names else [],
        label_columns=1,
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
