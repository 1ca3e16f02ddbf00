"""The differences between two reports: settings that changed, verdicts, and modes that are gone."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infer.report.views import ModeView, list_modes
from infer.results.schema import LosslessVerdict, Report, Verdict

SETTINGS = ("target", "device", "versions", "sampling", "tree", "prompts")  # groups of the setup
DERIVED_SETTINGS = ("prompts.contamination", "prompts.by_category")  # that follow from others

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
    setup = asdict(report.setup)
    settings = {f"{group}.{key}": value for group in SETTINGS for key, value in setup[group].items()}
    settings = {key: value for key, value in settings.items() if key not in DERIVED_SETTINGS}
    settings["drafts"] = ", ".join(f"{d.name} ({d.method}, {d.parameters:,} parameters)" for d in report.drafts)
    settings |= {f"{draft.name}: tuned": draft.tuned_tree for draft in report.drafts if draft.tuned_tree}
    for view in list_modes(report):
        figures = view.mode.figures
        facts = {"verification": view.mode.verdict.verification, "depth": figures.depth, "nodes": figures.nodes}
        settings |= {f"{view.label}: {key}": value for key, value in facts.items()}
    return settings


def find_not_lossless(before: Report, after: Report) -> VerdictPairs:
    """Return both verdicts of each mode that the second report does not call lossless.

    A mode with a lossy rule is left out, unless its rule in the first report is not lossy.
    """
    old_verdicts, new_verdicts = map(_collect_verdicts, index_modes([before, after]))
    pairs = {name: (old_verdicts.get(name), new) for name, new in new_verdicts.items()}
    return {
        name: (old and old.lossless, new.lossless)
        for name, (old, new) in pairs.items()
        if new.lossless is not LosslessVerdict.yes and not (new.lossy and (old is None or old.lossy))
    }


def _collect_verdicts(views: dict[str, ModeView]) -> dict[str, Verdict]:
    """Return by name all verdicts on losslessness: those of modes and of batches."""
    return {name: view.mode.verdict for name, view in views.items()} | {
        f"{name}, batch {batch.size}": batch.verdict
        for name, view in views.items()
        if view.draft and view.name == "tree"
        for batch in view.draft.batches
    }


def find_missing_modes(before: Report, after: Report) -> dict[str, str]:
    """Return the modes that are no longer measured, each with the reason or an empty string."""
    old_views, new_views = index_modes([before, after])
    reasons = {
        _name_mode(f"{draft.name}/{name}", is_single=_is_single([before, after])): reason
        for draft in after.drafts
        for name, reason in draft.not_measured.items()
    }
    gone = {name: reasons.get(name, "") for name in old_views if name not in new_views}
    taus = (
        (name, *(views[name].mode.figures.acceptance_length for views in (old_views, new_views)))
        for name in old_views
        if name in new_views
    )
    return gone | {name: "no answer took a round" for name, old, new in taus if old and new is None}


def index_modes(reports: Sequence[Report]) -> list[dict[str, ModeView]]:
    """Return each report's modes by name; with one draft in each, its name does not matter."""
    is_single = _is_single(reports)
    return [{_name_mode(view.key, is_single=is_single): view for view in list_modes(report)} for report in reports]


def _is_single(reports: Sequence[Report]) -> bool:
    return all(len(report.drafts) == 1 for report in reports)


def _name_mode(key: str, *, is_single: bool) -> str:
    """Replace the only draft's name with `draft`, so that no mode is taken for the target's."""
    draft, _, name = key.rpartition("/")
    return f"draft/{name}" if draft and is_single else key


def has_same_prompts(before: Report, after: Report) -> bool:
    """Return whether both reports hold the same prompts in the same order."""
    old_ids, new_ids = ([row.prompt_id for row in r.per_prompt] for r in (before, after))
    return before.setup.prompts.sha256 == after.setup.prompts.sha256 and old_ids == new_ids
