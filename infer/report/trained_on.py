"""Whether drafts learned the prompts that they are judged by, in one line."""

from infer.report.views import Report


def trained_on(report: Report) -> list[str]:
    """A line for each answer that some draft was given; none where nobody asked."""
    prompts = report["prompts"]
    drafts: dict[str, list[str]] = {}
    for name, found in prompts["contamination"].items():
        drafts.setdefault(_said(found, prompts["count"]), []).append(name)
    return [f"{', '.join(names)}: {said}" for said, names in drafts.items()]


def _said(found: dict, count: int) -> str:
    if not found["checked"]:
        return f"not checked for held-out prompts in the training data: {found['reason']}."
    if not found["count"]:
        return f"none of the {count} held-out prompts is in the training data."
    few = ", ".join(found["ids"][:3]) + (", ..." if found["count"] > 3 else "")
    return f"{found['count']} of the {count} held-out prompts are in the training data ({few})."
