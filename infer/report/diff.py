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

from infer.measure.intervals import Statistic, estimate_interval, ratio_of_means
from infer.measure.metrics import ratio_of_ratios, subtract_statistics, sum_by_question
from infer.measure.report_schema import LosslessVerdict, PromptFigures, Report, Verdict
from infer.report.views import ModeView, list_measured_modes, list_modes

DERIVED_SETTINGS = ("contamination", "by_category")  # keys under "prompts" that follow from others
FALSE_ALARM_RATE = 0.05  # share of comparisons in which nothing changed

VerdictPairs = dict[str, tuple[str | None, str]]  # of each mode, before and after
ColumnFunction = Callable[[PromptFigures, PromptFigures], tuple[float, ...]]


def _decode_columns(row: PromptFigures) -> tuple[float, float]:
    return row.tokens - 1.0, (row.e2e_ms - row.ttft_ms) / 1000


# For each metric: the columns of a prompt, computed from its rows in the mode and in autoregressive
# decoding; the statistic of these columns; and whether a fall of it is a regression.
COMPARED_METRICS: dict[str, tuple[ColumnFunction, Statistic, bool]] = {
    "tau": (lambda row, _: (row.accepted + row.rounds, row.rounds), ratio_of_means, True),
    "acceptance rate": (lambda row, _: (row.accepted, row.drafted), ratio_of_means, False),
    "speed-up": (
        lambda row, baseline: _decode_columns(row) + _decode_columns(baseline),
        ratio_of_ratios,
        True,
    ),
    "tokens/s": (lambda row, _: _decode_columns(row), ratio_of_means, False),
}
NUM_GRAVE_METRICS = sum(grave for _, _, grave in COMPARED_METRICS.values())


@dataclass(frozen=True, kw_only=True)
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
        grave = COMPARED_METRICS[self.metric][2]
        return grave and self.is_beyond_noise and self.after < self.before


def find_changed_settings(before: Report, after: Report) -> list[str]:
    """Return a line for each difference in what was measured, and on what."""
    old, new = (_collect_settings(report) for report in (before, after))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def _collect_settings(report: Report) -> dict[str, Any]:
    groups = {
        "target": vars(report.target),
        "device": vars(report.device),
        "versions": report.versions,
        "sampling": vars(report.sampling),
        "tree": vars(report.tree),
        "prompts": vars(report.prompts),
    }
    drafts = [f"{d.name} ({d.method}, {d.parameters:,} parameters)" for d in report.drafts]
    return (
        {
            f"{group}.{key}": value
            for group, values in groups.items()
            for key, value in values.items()
            if key not in DERIVED_SETTINGS
        }
        | {"drafts": ", ".join(drafts)}
        | {f"{draft.name}: tuned": draft.tuned_tree for draft in report.drafts if draft.tuned_tree}
        | {
            f"{label}: {key}": getattr(mode, key)
            for label, mode in list_measured_modes(report)
            for key in ("verification", "batch", "depth", "nodes")
        }
    )


def find_not_lossless(before: Report, after: Report) -> VerdictPairs:
    """Return both verdicts of each mode that the second report does not call lossless.

    A mode with a lossy rule is left out, unless its rule in the first report is not lossy.
    """
    old_verdicts, new_verdicts = map(
        _collect_verdicts, _index_modes(before, after), (before, after)
    )
    pairs = {name: (old_verdicts.get(name), new) for name, new in new_verdicts.items()}
    return {
        name: (old and old.lossless, new.lossless)
        for name, (old, new) in pairs.items()
        if new.lossless is not LosslessVerdict.yes
        and not (new.lossy and (old is None or old.lossy))
    }


def _collect_verdicts(views: dict[str, ModeView], report: Report) -> dict[str, Verdict]:
    """Return by name all verdicts on losslessness: those of modes and of batches."""
    names = {view.key: name for name, view in views.items()}
    verdicts: dict[str, Verdict] = {name: v.mode for name, v in views.items() if v.mode}
    for batch in report.batches:
        key = f"{batch.draft}/{batch.mode}"
        verdicts[f"{names.get(key, key)}, batch {batch.batch}"] = batch
    return verdicts


def find_missing_modes(before: Report, after: Report) -> dict[str, str]:
    """Return the modes that are no longer measured, each with the reason or an empty string."""
    old_views, new_views = _index_modes(before, after)
    return {
        name: new_views[name].reason if name in new_views else ""
        for name, old in old_views.items()
        if old.mode and (name not in new_views or not new_views[name].mode)
    }


def _index_modes(before: Report, after: Report) -> list[dict[str, ModeView]]:
    """Return each report's modes by name; with one draft in each, its name does not matter."""
    single_draft = len(before.drafts) == len(after.drafts) == 1
    return [
        {
            _mode_name(report, view.key) if single_draft else view.key: view
            for view in list_modes(report)
        }
        for report in (before, after)
    ]


def _mode_name(report: Report, key: str) -> str:
    """Replace the only draft's name with `draft`, so that no mode is taken for the target's."""
    prefix = f"{report.drafts[0].name}/"
    return f"draft/{key.removeprefix(prefix)}" if key.startswith(prefix) else key


def has_same_prompts(before: Report, after: Report) -> bool:
    """Return whether both reports hold the same prompts in the same order."""
    old_ids, new_ids = ([row.prompt_id for row in r.per_prompt] for r in (before, after))
    return before.prompts.sha256 == after.prompts.sha256 and old_ids == new_ids


def compare_metrics(before: Report, after: Report) -> Iterator[MetricChange]:
    """Yield every metric of every mode that both reports have."""
    old_views, new_views = _index_modes(before, after)
    shared = [
        (name, old, new_views[name])
        for name, old in old_views.items()
        if old.mode and name in new_views and new_views[name].mode
    ]
    num_drafting = sum(old.mode is not None and old.mode.depth > 0 for _, old, _ in shared)
    # Bonferroni, over the comparisons that can be a regression.
    level = 1 - FALSE_ALARM_RATE / max(1, NUM_GRAVE_METRICS * num_drafting)
    paired = has_same_prompts(before, after)
    for name, old_view, new_view in shared:
        for metric, (columns, statistic, _) in COMPARED_METRICS.items():
            old_rows = _collect_rows(before, old_view.key, columns)
            new_rows = _collect_rows(after, new_view.key, columns)
            old, old_interval = estimate_interval(old_rows, statistic, level=level)
            new, new_interval = estimate_interval(new_rows, statistic, level=level)
            if old is None or new is None:
                continue
            if paired:
                subtract = subtract_statistics(statistic, old_rows.shape[1])
                rows = np.hstack([new_rows, old_rows])
                _, interval = estimate_interval(rows, subtract, level=level)
            else:
                interval = _join_intervals(old, new, old_interval, new_interval)
            yield MetricChange(mode=name, metric=metric, before=old, after=new, interval=interval)


def _collect_rows(
    report: Report, key: str, columns: ColumnFunction
) -> Float[ndarray, "questions columns"]:
    # A draft that adapts its target has an autoregressive mode to be compared with.
    baseline = f"{key.rpartition('/')[0]}/autoregressive"
    rows = [
        columns(row.modes[key], row.modes.get(baseline, row.modes["autoregressive"]))
        for row in report.per_prompt
    ]
    return sum_by_question(
        np.array(rows, dtype=np.float64), [row.question for row in report.per_prompt]
    )


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
