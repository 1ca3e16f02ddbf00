"""What differs between two reports: in what was measured, and beyond noise in the figures.

Of the same prompts, figures are paired prompt by prompt. Of different ones the two intervals are
joined into one of the difference (Zou and Donner, Statistics in Medicine 27, 2008).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.measure.intervals import ratio, with_interval
from infer.measure.metrics import by_question, difference, ratio_of_ratios
from infer.measure.records import Verdict
from infer.report.views import Mode, Named, Report, modes_of

SETTINGS = ("target", "device", "versions", "sampling", "tree", "prompts")
MEASURED_AGAIN = ("contamination", "by_category")  # of the prompts; they follow from others
PLAIN = "autoregressive"
FALSE_ALARMS = 0.05  # of comparisons in which nothing changed

Verdicts = dict[str, tuple[str | None, str]]  # of a mode in two reports
Columns = Callable[[dict[str, Any], dict[str, Any]], tuple[float, ...]]


def _decoded(row: dict[str, Any]) -> tuple[float, float]:
    return row["tokens"] - 1.0, (row["e2e_ms"] - row["ttft_ms"]) / 1000


# Columns of a prompt beside its autoregressive ones, their function, and whether a fall is grave.
FIGURES: dict[str, tuple[Columns, Callable[[ndarray], ndarray], bool]] = {
    "tau": (lambda row, _: (row["accepted"] + row["rounds"], row["rounds"]), ratio, True),
    "acceptance rate": (lambda row, _: (row["accepted"], row["drafted"]), ratio, False),
    "speed-up": (lambda row, plain: _decoded(row) + _decoded(plain), ratio_of_ratios, True),
    "tokens/s": (lambda row, _: _decoded(row), ratio, False),
}
GRAVE = sum(grave for _, _, grave in FIGURES.values())


@dataclass(kw_only=True)
class Move:
    """A figure of a mode in two reports, and what their difference lies in."""

    mode: str
    figure: str
    before: float
    after: float
    interval: list[float] | None

    @property
    def beyond_noise(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def regression(self) -> bool:
        return FIGURES[self.figure][2] and self.beyond_noise and self.after < self.before


@dataclass(kw_only=True)
class Both:
    """A mode that two reports have, and its keys in their rows of prompts."""

    label: str
    keys: tuple[str, str]
    modes: tuple[Mode, Mode]


def settings_changed(before: Report, after: Report) -> list[str]:
    """What was measured, on what: one line for each difference."""
    ours, theirs = (_settings(report) for report in (before, after))
    return [
        f"{key}: {ours.get(key, 'absent')} -> {theirs.get(key, 'absent')}"
        for key in ours | theirs
        if ours.get(key, "absent") != theirs.get(key, "absent")
    ]


def _settings(report: Report) -> dict[str, Any]:
    found = {
        f"{group}.{key}": value
        for group in SETTINGS
        for key, value in report[group].items()
        if key not in MEASURED_AGAIN
    }
    found["drafts"] = ", ".join(
        f"{d['name']} ({d['method']}, {d['parameters']:,} parameters)" for d in report["drafts"]
    )
    return found | {
        f"{one.label}: {key}": one.mode[key]
        for one in modes_of(report)
        if one.mode
        for key in ("verification", "batch", "depth", "nodes")
    }


def in_both(before: Report, after: Report) -> list[Both]:
    """Modes by name; where each report has one draft, whatever the two are called."""
    ours, theirs = _named(before, after)
    return [
        Both(label=name, keys=(one.key, theirs[name].key), modes=(mode, other))
        for name, one in ours.items()
        if (mode := one.mode) and name in theirs and (other := theirs[name].mode)
    ]


def find_not_lossless(before: Report, after: Report) -> Verdicts:
    """Modes whose answers the second report does not call the target's: both verdicts.

    A mode under a lossy rule is left out, unless the first report has it under another.
    """
    named = _named(before, after)
    ours, theirs = map(_collect_verdicts, named, (before, after))
    found = {}
    for name, mode in theirs.items():
        old = ours.get(name)
        lossy = mode["lossy"] and (old is None or old["lossy"])
        if mode["lossless"] != Verdict.yes and not lossy:
            found[name] = (old and old["lossless"], mode["lossless"])
    return found


def _collect_verdicts(named: dict[str, Named], report: Report) -> dict[str, dict[str, Any]]:
    """All modes that say whether they are lossless, those with several rows at a time too."""
    found = {name: one.mode for name, one in named.items() if one.mode}
    names = {one.key: name for name, one in named.items()}
    for at in report.get("batches", []):
        key = f"{at['draft']}/{at['mode']}"
        found[f"{names.get(key, key)}, batch {at['batch']}"] = at
    return found


def gone(before: Report, after: Report) -> dict[str, str]:
    """Modes that were measured before and no longer are, and why, where the report says so."""
    ours, theirs = _named(before, after)
    return {
        name: theirs[name].reason if name in theirs else ""
        for name, one in ours.items()
        if one.mode and (name not in theirs or not theirs[name].mode)
    }


def _named(before: Report, after: Report) -> list[dict[str, Named]]:
    reports = (before, after)
    if any(len(report["drafts"]) != 1 for report in reports):
        return [{one.key: one for one in modes_of(report)} for report in reports]
    return [{_name(report, one.key): one for one in modes_of(report)} for report in reports]


def _name(report: Report, key: str) -> str:
    """Without the name of the only draft, but not confused with a mode of the target."""
    own = f"{report['drafts'][0]['name']}/"
    return f"draft/{key.removeprefix(own)}" if key.startswith(own) else key


def read_whole(report: Report) -> None:
    """Read every field that a comparison does: what it lacks is found before anything is said."""
    paired(report, report)
    settings_changed(report, report)
    find_not_lossless(report, report)
    for one in in_both(report, report):
        for columns, _, _ in FIGURES.values():
            _rows(report, one.keys[0], columns)


def paired(before: Report, after: Report) -> bool:
    """Whether they hold the same prompts."""
    ids = [[row["prompt_id"] for row in report["per_prompt"]] for report in (before, after)]
    return before["prompts"]["sha256"] == after["prompts"]["sha256"] and ids[0] == ids[1]


def moves(before: Report, after: Report) -> Iterator[Move]:
    """Every figure of every mode that both have."""
    both, same = in_both(before, after), paired(before, after)
    drafting = sum(one.modes[0]["depth"] > 0 for one in both)
    level = 1 - FALSE_ALARMS / max(1, GRAVE * drafting)  # Bonferroni, over what is grave
    for one in both:
        for figure, (columns, statistic, _) in FIGURES.items():
            rows = [
                _rows(report, key, columns)
                for report, key in zip((before, after), one.keys, strict=True)
            ]
            values = [with_interval(part, statistic, level=level) for part in rows]
            (old, first), (new, second) = values
            if old is None or new is None:
                continue
            if same:
                subtract = difference(statistic, rows[0].shape[1])
                _, interval = with_interval(np.hstack(rows[::-1]), subtract, level=level)
            else:
                interval = _joined(old, new, first, second)
            yield Move(mode=one.label, figure=figure, before=old, after=new, interval=interval)


def _rows(report: Report, key: str, columns: Columns) -> Float[ndarray, "questions columns"]:
    own = f"{key.rpartition('/')[0]}/{PLAIN}"  # of a draft that brought its target
    rows, questions = [], []
    for prompt in report["per_prompt"]:
        modes = prompt["modes"]
        rows.append(columns(modes[key], modes.get(own, modes[PLAIN])))
        questions.append(prompt["question"])
    return by_question(np.array(rows, dtype=np.float64), questions)


def _joined(
    old: float, new: float, first: list[float] | None, second: list[float] | None
) -> list[float] | None:
    """Of new - old, each with its own interval, measured apart.

    >>> _joined(1.0, 5.0, [0.0, 4.0], [1.0, 6.0])
    [-1.0, 5.414213562373095]
    """
    if first is None or second is None:
        return None
    apart = new - old
    return [
        apart - math.hypot(new - second[0], first[1] - old),
        apart + math.hypot(second[1] - new, old - first[0]),
    ]
