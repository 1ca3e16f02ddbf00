"""The differences between two reports: settings that changed, and figures that moved beyond noise.

Figures over the same prompts are paired prompt by prompt. For different prompts the two intervals
are joined into one of the difference (Zou and Donner, Statistics in Medicine 27, 2008).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.measure.intervals import estimate_interval, ratio_of_means
from infer.measure.metrics import ratio_of_ratios, subtract_statistics, sum_by_question
from infer.measure.records import LosslessVerdict
from infer.report.views import ModeDict, ModeView, ReportDict, list_modes

COMPARED_SETTINGS = ("target", "device", "versions", "sampling", "tree", "prompts")
DERIVED_SETTINGS = ("contamination", "by_category")  # keys under "prompts" that follow from others
AUTOREGRESSIVE_MODE = "autoregressive"
FALSE_ALARM_RATE = 0.05  # share of comparisons in which nothing changed

VerdictPairs = dict[str, tuple[str | None, str]]  # of each mode, before and after
ColumnFunction = Callable[[dict[str, Any], dict[str, Any]], tuple[float, ...]]


def _decode_columns(row: dict[str, Any]) -> tuple[float, float]:
    return row["tokens"] - 1.0, (row["e2e_ms"] - row["ttft_ms"]) / 1000


# For each metric: the columns of a prompt, computed from its rows in the mode and in autoregressive
# decoding; the statistic of these columns; and whether a fall of it is a regression.
COMPARED_METRICS: dict[str, tuple[ColumnFunction, Callable[[ndarray], ndarray], bool]] = {
    "tau": (lambda row, _: (row["accepted"] + row["rounds"], row["rounds"]), ratio_of_means, True),
    "acceptance rate": (lambda row, _: (row["accepted"], row["drafted"]), ratio_of_means, False),
    "speed-up": (
        lambda row, baseline: _decode_columns(row) + _decode_columns(baseline),
        ratio_of_ratios,
        True,
    ),
    "tokens/s": (lambda row, _: _decode_columns(row), ratio_of_means, False),
}
NUM_GRAVE_METRICS = sum(grave for _, _, grave in COMPARED_METRICS.values())


@dataclass(kw_only=True)
class MetricChange:
    """A figure of a mode in two reports, and the interval of the difference."""

    mode: str
    metric: str
    before: float
    after: float
    interval: list[float] | None

    @property
    def is_beyond_noise(self) -> bool:
        """Return whether the interval of the difference excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def is_regression(self) -> bool:
        """Return whether a metric that must not fall has fallen beyond noise."""
        return (
            COMPARED_METRICS[self.metric][2] and self.is_beyond_noise and self.after < self.before
        )


@dataclass(kw_only=True)
class SharedMode:
    """A mode that both reports have, and its key in the rows of `per_prompt` of each."""

    label: str
    keys: tuple[str, str]
    modes: tuple[ModeDict, ModeDict]


def find_changed_settings(before: ReportDict, after: ReportDict) -> list[str]:
    """Return a line for each difference in what was measured, and on what."""
    old, new = (_collect_settings(report) for report in (before, after))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in old | new
        if old.get(key, "absent") != new.get(key, "absent")
    ]


def _collect_settings(report: ReportDict) -> dict[str, Any]:
    settings = {
        f"{group}.{key}": value
        for group in COMPARED_SETTINGS
        for key, value in report[group].items()
        if key not in DERIVED_SETTINGS
    }
    settings["drafts"] = ", ".join(
        f"{d['name']} ({d['method']}, {d['parameters']:,} parameters)" for d in report["drafts"]
    )
    return settings | {
        f"{view.label}: {key}": view.mode[key]
        for view in list_modes(report)
        if view.mode
        for key in ("verification", "batch", "depth", "nodes")
    }


def find_shared_modes(before: ReportDict, after: ReportDict) -> list[SharedMode]:
    """Match modes by name; if each report has a single draft, the drafts' names do not matter."""
    old_views, new_views = _index_modes(before, after)
    return [
        SharedMode(label=name, keys=(old.key, new_views[name].key), modes=(old_mode, new_mode))
        for name, old in old_views.items()
        if (old_mode := old.mode) and name in new_views and (new_mode := new_views[name].mode)
    ]


def find_not_lossless(before: ReportDict, after: ReportDict) -> VerdictPairs:
    """Return both verdicts of each mode that the second report does not call lossless.

    A mode with a lossy rule is left out, unless its rule in the first report is not lossy.
    """
    views = _index_modes(before, after)
    old_modes, new_modes = map(_collect_verdicts, views, (before, after))
    verdicts = {}
    for name, new in new_modes.items():
        old = old_modes.get(name)
        lossy = new["lossy"] and (old is None or old["lossy"])
        if new["lossless"] != LosslessVerdict.yes and not lossy:
            verdicts[name] = (old and old["lossless"], new["lossless"])
    return verdicts


def _collect_verdicts(views: dict[str, ModeView], report: ReportDict) -> dict[str, dict[str, Any]]:
    """Collect by name everything that has a verdict on losslessness: modes and batches."""
    results = {name: view.mode for name, view in views.items() if view.mode}
    names = {view.key: name for name, view in views.items()}
    for batch in report.get("batches", []):
        key = f"{batch['draft']}/{batch['mode']}"
        results[f"{names.get(key, key)}, batch {batch['batch']}"] = batch
    return results


def find_missing_modes(before: ReportDict, after: ReportDict) -> dict[str, str]:
    """Return the modes that are no longer measured, each with the reason or an empty string."""
    old_views, new_views = _index_modes(before, after)
    return {
        name: new_views[name].reason if name in new_views else ""
        for name, old in old_views.items()
        if old.mode and (name not in new_views or not new_views[name].mode)
    }


def _index_modes(before: ReportDict, after: ReportDict) -> list[dict[str, ModeView]]:
    reports = (before, after)
    if any(len(report["drafts"]) != 1 for report in reports):
        return [{view.key: view for view in list_modes(report)} for report in reports]
    return [
        {_mode_name(report, view.key): view for view in list_modes(report)} for report in reports
    ]


def _mode_name(report: ReportDict, key: str) -> str:
    """Replace the only draft's name by `draft`, so that no mode is taken for one of the target."""
    prefix = f"{report['drafts'][0]['name']}/"
    return f"draft/{key.removeprefix(prefix)}" if key.startswith(prefix) else key


def check_report_fields(report: ReportDict) -> None:
    """Read every field that a comparison needs, so that a missing one raises before any output."""
    has_same_prompts(report, report)
    find_changed_settings(report, report)
    find_not_lossless(report, report)
    for shared in find_shared_modes(report, report):
        for columns, _, _ in COMPARED_METRICS.values():
            _collect_rows(report, shared.keys[0], columns)


def has_same_prompts(before: ReportDict, after: ReportDict) -> bool:
    """Return whether both reports hold the same prompts in the same order."""
    ids = [[row["prompt_id"] for row in report["per_prompt"]] for report in (before, after)]
    return before["prompts"]["sha256"] == after["prompts"]["sha256"] and ids[0] == ids[1]


def compare_metrics(before: ReportDict, after: ReportDict) -> Iterator[MetricChange]:
    """Yield every metric of every mode that both reports have."""
    shared_modes, paired = find_shared_modes(before, after), has_same_prompts(before, after)
    num_drafting = sum(shared.modes[0]["depth"] > 0 for shared in shared_modes)
    # Bonferroni, over the comparisons that can be a regression.
    level = 1 - FALSE_ALARM_RATE / max(1, NUM_GRAVE_METRICS * num_drafting)
    for shared in shared_modes:
        for metric, (columns, statistic, _) in COMPARED_METRICS.items():
            rows = [
                _collect_rows(report, key, columns)
                for report, key in zip((before, after), shared.keys, strict=True)
            ]
            estimates = [estimate_interval(values, statistic, level=level) for values in rows]
            (old, old_interval), (new, new_interval) = estimates
            if old is None or new is None:
                continue
            if paired:
                subtract = subtract_statistics(statistic, rows[0].shape[1])
                _, interval = estimate_interval(np.hstack(rows[::-1]), subtract, level=level)
            else:
                interval = _join_intervals(old, new, old_interval, new_interval)
            yield MetricChange(
                mode=shared.label, metric=metric, before=old, after=new, interval=interval
            )


def _collect_rows(
    report: ReportDict, key: str, columns: ColumnFunction
) -> Float[ndarray, "questions columns"]:
    # A draft that adapts its target has an autoregressive mode to be compared with.
    baseline = f"{key.rpartition('/')[0]}/{AUTOREGRESSIVE_MODE}"
    rows, questions = [], []
    for prompt in report["per_prompt"]:
        modes = prompt["modes"]
        rows.append(columns(modes[key], modes.get(baseline, modes[AUTOREGRESSIVE_MODE])))
        questions.append(prompt["question"])
    return sum_by_question(np.array(rows, dtype=np.float64), questions)


def _join_intervals(
    old: float, new: float, old_interval: list[float] | None, new_interval: list[float] | None
) -> list[float] | None:
    """Return the interval of new - old from the intervals of two independent measurements.

    >>> _join_intervals(1.0, 5.0, [0.0, 4.0], [1.0, 6.0])
    [-1.0, 5.414213562373095]
    """
    if old_interval is None or new_interval is None:
        return None
    difference = new - old
    return [
        difference - math.hypot(new - new_interval[0], old_interval[1] - old),
        difference + math.hypot(new_interval[1] - new, old - old_interval[0]),
    ]
