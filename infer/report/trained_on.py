"""Sentences about evaluation prompts that are in the training data of drafts."""

from infer.report.views import ReportDict


def describe_contamination(report: ReportDict) -> list[str]:
    """Return a line for each distinct result of the check, with the drafts that it holds for.

    The list is empty if the check was not requested for any draft.
    """
    prompts = report["prompts"]
    drafts: dict[str, list[str]] = {}
    for name, check in prompts["contamination"].items():
        drafts.setdefault(_describe_check(check, prompts["count"]), []).append(name)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in drafts.items()]


def _describe_check(check: dict, count: int) -> str:
    if not check["checked"]:
        return f"not checked for held-out prompts in the training data: {check['reason']}."
    if not check["count"]:
        return f"none of the {count} held-out prompts is in the training data."
    ids = ", ".join(check["ids"][:3]) + (", ..." if check["count"] > 3 else "")
    return f"{check['count']} of the {count} held-out prompts are in the training data ({ids})."
