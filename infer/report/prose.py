"""The report in sentences: what was measured, on what, and what to know before comparing."""

from dataclasses import asdict

from infer.measure.records import Verdict
from infer.report.length_table import prompts_said
from infer.report.trained_on import trained_on
from infer.report.views import Report, modes_of
from models.speculate.sampling import SamplingConf


def headline(report: Report) -> str:
    """What was measured, on what, in three sentences; then what is not as usual."""
    target, prompts, device = report["target"], report["prompts"], report["device"]
    tree = report["tree"]
    drafts = [
        f"{draft['name']} ({draft['method']}, {draft['parameters']:,} parameters)"
        for draft in report["drafts"]
    ]
    usual_rule = asdict(SamplingConf()) | {"temperature": None}  # the temperature is always said
    sampling = [
        f"{key} {value}"
        for key, value in report["sampling"].items()
        if value is not None and value != usual_rule.get(key)
    ]
    rules = list(dict.fromkeys(mode["verification"] for mode in _of_drafts(report)))
    threads = f"{device['threads']} thread{'' if device['threads'] == 1 else 's'}"
    place = f"{device['name']} ({device['kind']}, {threads}"
    compiled = "compiled" if device["compiled"] else "not compiled"
    usual = (
        f"{target['name']} ({target['parameters']:,} parameters, {device['dtype']}) decoded with "
        f"{_listed(drafts) or 'no draft'} was compared with its own autoregressive decoding, "
        f"prompt by prompt in one run. {prompts_said(report)} were continued by up to "
        f"{prompts['max_new_tokens']} tokens on {place}, {compiled}), {', '.join(sampling)}; "
        f"verification: {_listed(rules) or 'none'}. "
        f"Tree: {tree['kind']}, {tree['nodes']} nodes of the draft up to depth {tree['depth']}, "
        f"{tree['copied'] or 'none'} copied by n-gram lookup."
    )
    return remarked(usual, report)


def remarks(report: Report) -> list[str]:
    """What forbids to compare a figure with the others as they stand."""
    found = [
        f"{draft['name']} is compared with its own adapted target, whose answers differ from the "
        f"original's on {own['changed_answers']} of {report['prompts']['count']} prompts."
        for draft in report["drafts"]
        if (own := draft["target"])
    ]
    lossy = {mode["verification"]: None for mode in _of_drafts(report) if mode["lossy"]}
    return found + [
        f"The drafts are verified by the {rule} rule, which is lossy: their answers are not the "
        "target's."
        for rule in lossy
    ]


def remarked(text: str, report: Report) -> str:
    """The text and the remarks behind it."""
    return " ".join([text, *remarks(report)])


def absences(report: Report) -> list[str]:
    """One line for each mode that was not measured, with its reason."""
    return [
        f"{one.label}: not measured: {one.reason}" for one in modes_of(report) if one.mode is None
    ] + trained_on(report)


def bottlenecks(report: Report) -> list[str]:
    """Of each main mode the sentence that says what holds its speed-up back."""
    return [
        f"{one.label}: {said}"
        for one in modes_of(report, main=True)
        if one.mode and (said := one.mode.get("bottleneck"))
    ]


def explain_undecided(report: Report) -> list[str]:
    """What a gap that the precision does not explain leaves open, and how to decide it."""
    gaps = {
        f"{one.mode['near_tie_gap']:.3g} logits is wider than the {one.mode['explained_gap']:.3g}"
        for one in modes_of(report)
        if one.mode and one.mode["lossless"] == Verdict.undecided
    }
    dtype = report["device"]["dtype"]
    how = "decode with device.precision=float32"
    if dtype == "float32":
        how = "one-token passes differ from a plain reading of the same tokens"
    return [
        f"undecided: a near-tie gap of {gap} that {dtype} explains in this target; {how}."
        for gap in sorted(gaps)
    ]


def _of_drafts(report: Report) -> list[dict]:
    return [mode for draft in report["drafts"] for mode in draft["modes"].values() if mode]


def _listed(items: list[str]) -> str:
    """One, two and three.

    >>> _listed(["one", "two", "three"])
    'one, two and three'
    """
    *before, last = items or [""]
    return f"{', '.join(before)} and {last}" if before else last
