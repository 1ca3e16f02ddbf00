"""The sentences of a report: settings, remarks on comparability, and bottlenecks."""

from dataclasses import asdict

from infer.measure.records import LosslessVerdict
from infer.report.length_table import describe_prompts
from infer.report.trained_on import describe_contamination
from infer.report.views import ReportDict, list_modes
from models.speculate.sampling import SamplingConf


def build_headline(report: ReportDict) -> str:
    """Describe in three sentences what was measured, and on what; then append the remarks."""
    target, prompts, device = report["target"], report["prompts"], report["device"]
    tree = report["tree"]
    drafts = [
        f"{draft['name']} ({draft['method']}, {draft['parameters']:,} parameters)"
        for draft in report["drafts"]
    ]
    # Options at their defaults are left out, but the temperature is always listed.
    defaults = asdict(SamplingConf()) | {"temperature": None}
    sampling = [
        f"{key} {value}"
        for key, value in report["sampling"].items()
        if value is not None and value != defaults.get(key)
    ]
    rules = list(dict.fromkeys(mode["verification"] for mode in _list_draft_modes(report)))
    threads = f"{device['threads']} thread{'' if device['threads'] == 1 else 's'}"
    hardware = f"{device['name']} ({device['kind']}, {threads}"
    compiled = "compiled" if device["compiled"] else "not compiled"
    headline = (
        f"{target['name']} ({target['parameters']:,} parameters, {device['dtype']}) decoded with "
        f"{_join_words(drafts) or 'no draft'} was compared with its own autoregressive decoding, "
        f"prompt by prompt in one run. {describe_prompts(report)} were continued by up to "
        f"{prompts['max_new_tokens']} tokens on {hardware}, {compiled}), {', '.join(sampling)}; "
        f"verification: {_join_words(rules) or 'none'}. "
        f"Tree: {tree['kind']}, {tree['nodes']} nodes of the draft up to depth {tree['depth']}, "
        f"{tree['copied'] or 'none'} copied by n-gram lookup."
    )
    return append_remarks(headline, report)


def list_remarks(report: ReportDict) -> list[str]:
    """List the reasons why a draft's figures cannot be compared with the others as they are."""
    remarks = [
        f"{draft['name']} is compared with its own adapted target, whose answers differ from the "
        f"original's on {target['changed_answers']} of {report['prompts']['count']} prompts."
        for draft in report["drafts"]
        if (target := draft["target"])
    ]
    lossy = {mode["verification"]: None for mode in _list_draft_modes(report) if mode["lossy"]}
    return remarks + [
        f"The drafts are verified by the {rule} rule, which is lossy: their answers are not the "
        "target's."
        for rule in lossy
    ]


def append_remarks(text: str, report: ReportDict) -> str:
    """Append the remarks to the text."""
    return " ".join([text, *list_remarks(report)])


def list_absences(report: ReportDict) -> list[str]:
    """List each mode that was not measured and its reason; then the checks for contamination."""
    return [
        f"{view.label}: not measured: {view.reason}"
        for view in list_modes(report)
        if view.mode is None
    ] + describe_contamination(report)


def list_bottlenecks(report: ReportDict) -> list[str]:
    """List for each main mode the sentence on what limits its speed-up."""
    return [
        f"{view.label}: {sentence}"
        for view in list_modes(report, main=True)
        if view.mode and (sentence := view.mode.get("bottleneck"))
    ]


def explain_undecided(report: ReportDict) -> list[str]:
    """Explain each undecided verdict: the gap that causes it, and how to decide it."""
    gaps = {
        f"{view.mode['near_tie_gap']:.3g} logits is wider than the {view.mode['explained_gap']:.3g}"
        for view in list_modes(report)
        if view.mode and view.mode["lossless"] == LosslessVerdict.undecided
    }
    dtype = report["device"]["dtype"]
    hint = "decode with device.precision=float32"
    if dtype == "float32":
        hint = "one-token passes differ from a single pass over the same tokens"
    return [
        f"undecided: a near-tie gap of {gap} that {dtype} explains in this target; {hint}."
        for gap in sorted(gaps)
    ]


def _list_draft_modes(report: ReportDict) -> list[dict]:
    return [mode for draft in report["drafts"] for mode in draft["modes"].values() if mode]


def _join_words(items: list[str]) -> str:
    """Join items as in `one, two and three`.

    >>> _join_words(["one", "two", "three"])
    'one, two and three'
    """
    *before, last = items or [""]
    return f"{', '.join(before)} and {last}" if before else last
