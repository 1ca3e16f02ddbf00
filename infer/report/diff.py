"""The differences between two reports: settings that changed, verdicts, and modes that are gone."""

from collections.abc import Sequence
from typing import Any

from infer.measure.report_schema import LosslessVerdict, Report, Verdict
from infer.report.views import ModeView, list_measured_modes, list_modes

DERIVED_SETTINGS = ("contamination", "by_category")  # keys under "prompts" that follow from others

VerdictPairs = dict[str, tuple[str | None, str]]  # of each mode, before and after


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
        _collect_verdicts, index_modes([before, after]), (before, after)
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
    old_views, new_views = index_modes([before, after])
    return {
        name: new_views[name].reason if name in new_views else ""
        for name, old in old_views.items()
        if old.mode and (name not in new_views or not new_views[name].mode)
    }


def index_modes(reports: Sequence[Report]) -> list[dict[str, ModeView]]:
    """Return each report's modes by name; with one draft in each, its name does not matter."""
    single_draft = all(len(report.drafts) == 1 for report in reports)
    return [
        {
            _mode_name(report, view.key) if single_draft else view.key: view
            for view in list_modes(report)
        }
        for report in reports
    ]


def _mode_name(report: Report, key: str) -> str:
    """Replace the only draft's name with `draft`, so that no mode is taken for the target's."""
    prefix = f"{report.drafts[0].name}/"
    return f"draft/{key.removeprefix(prefix)}" if key.startswith(prefix) else key


def has_same_prompts(before: Report, after: Report) -> bool:
    """Return whether both reports hold the same prompts in the same order."""
    old_ids, new_ids = ([row.prompt_id for row in r.per_prompt] for r in (before, after))
    return before.prompts.sha256 == after.prompts.sha256 and old_ids == new_ids
