"""The sentences of a report: settings, remarks on comparability, bottlenecks, and the training."""

from data.eval_prompts.contamination import Contamination
from infer.report.number_format import format_estimate, is_compared
from infer.report.views import ModeView, find_baseline, has_several_drafts, list_modes
from infer.results.curve import MIN_FITTED_POINTS, Trend, fit_rise, predict_tau, take_last_half
from infer.results.intervals import Estimate
from infer.results.schema import CurvePoint, DraftInfo, LosslessVerdict, Mode, Report


def build_headline(report: Report) -> str:
    """Return sentences on what was measured, with what and on what, followed by the remarks."""
    setup = report.setup
    target, prompts, device, tree = setup.target, setup.prompts, setup.device, setup.tree
    drafts = [f"{d.name} ({d.method}, {d.parameters:,} parameters)" for d in report.drafts]
    # Options at their defaults are left out, but the temperature is always listed.
    options = {"temperature": setup.sampling.temperature} | setup.sampling.changes
    sampling = [f"{key} {value}" for key, value in options.items()]
    rules = _list_rules(report)
    threads = f"{device.threads} thread{'' if device.threads == 1 else 's'}"
    late = setup.graphs_after_warmup
    compiled = "not compiled" if late is None else f"compiled, {late} graphs after the warm-up"
    how = "through the chat template" if prompts.chat_template else "as plain text"
    several = len(prompts.by_category) > 1
    categories = f" in {len(prompts.by_category)} categories" if several else ""
    if 0 < prompts.chat_template < prompts.count:
        how = f"{prompts.chat_template} of them {how}"
    return append_remarks(
        f"{target.name} ({target.parameters:,} parameters, {device.dtype}) decoded with "
        f"{_join_words(drafts) or 'no draft'} was compared with its own autoregressive decoding, prompt by prompt in "
        f"one run. {prompts.count} held-out prompts{categories} ({prompts.source}; {how}) were continued by up to "
        f"{prompts.max_new_tokens} tokens on {device.name} ({device.kind}, {threads}, {compiled}), "
        f"{', '.join(sampling)}; verification: {_join_words(rules) or 'none'}. Tree: {tree.kind}, {tree.nodes} nodes "
        f"of the draft up to depth {tree.depth}, {tree.copied or 'none'} copied by n-gram lookup."
        f"{_describe_tuned(report)}",
        report,
    )


def _describe_tuned(report: Report) -> str:
    """Return a sentence on what the mode `tuned` of each draft decodes with, if any has one."""
    tuned = [
        f"{view.draft.name} {view.draft.tuned_tree} (speed-up {format_estimate(view.mode.figures.speedup)})"
        for view in list_modes(report)
        if view.draft and view.name == "tuned"
    ]
    return f" Tuned for this device on other prompts: {'; '.join(tuned)}." if tuned else ""


def describe_verdicts(report: Report) -> list[str]:
    """Return a sentence for each draft: what it delivers, how much faster, with which output."""
    sentences = []
    for draft in report.drafts:
        name = "tree" if draft.tuned_tree is None else "tuned"
        mode = report.overall.modes[f"{draft.name}/{name}"]
        if (delivered := mode.figures.delivered_per_round) is None:
            continue
        how = f"tuned to {draft.tuned_tree}" if draft.tuned_tree else name
        sentences.append(
            f"{draft.name}, {how}: {delivered.mean:.2f} tokens delivered per round, "
            f"{format_estimate(mode.figures.speedup)} times as fast as the target alone, "
            f"{_describe_output(mode, draft)}."
        )
    return sentences


def _describe_output(mode: Mode, draft: DraftInfo) -> str:
    """Describe in a few words how the answers compare with those of the target alone, or of the one that it adapted."""
    verdict, own = mode.verdict, " as its adapted target" if draft.target else ""
    if verdict.lossy:
        return f"other output, as the {verdict.verification} rule is lossy"
    if not is_compared(verdict):
        return "output of the same distribution"
    different = f"{verdict.mismatched_prompts} of {mode.figures.prompts} answers differ"
    return {
        LosslessVerdict.yes: f"same output{own}"
        + (f" ({different}, by near-ties)" if verdict.mismatched_prompts else ""),
        LosslessVerdict.no: f"NOT the same output{own}: {different}",
        LosslessVerdict.undecided: f"output undecided: {different}",
    }[LosslessVerdict(verdict.lossless)]


def append_remarks(text: str, report: Report) -> str:
    """Append the reasons why a draft's figures cannot be compared with the others as they are."""
    adapted = (
        f"{draft.name} is compared with its own adapted target, whose answers differ from the "
        f"original's on {draft.target.changed_answers} of {report.setup.prompts.count} prompts."
        for draft in report.drafts
        if draft.target
    )
    lossy = (
        f"The drafts are verified by the {rule} rule, which is lossy: their answers are not the target's."
        for rule in _list_rules(report, lossy=True)
    )
    return " ".join([text, *adapted, *lossy])


def describe_bottlenecks(report: Report) -> list[str]:
    """Return a sentence for each main mode of a draft on what limits its speed-up most."""
    return [
        f"{view.label}: {sentence}"
        for view in list_modes(report, main=True)
        if (sentence := _describe_bottleneck(report, view))
    ]


def _describe_bottleneck(report: Report, view: ModeView) -> str | None:
    """Return the sentence on a mode, or None without a draft or times of its rounds; costs are in steps.

    A round that cost just one autoregressive step would make the speed-up equal to the acceptance length.
    """
    baseline = find_baseline(report, view.draft)
    split, plain, tau = view.mode.split_ms, baseline.split_ms, view.mode.figures.acceptance_length
    if view.mode.figures.predicted_speedup is None or split is None or plain is None or tau is None:
        return None
    step = plain.plain_step
    extra_steps = {
        "verifying more than one token": (split.verify - plain.verify) / step,
        "drafting": split.draft / step,
        "accepting": (split.accept - plain.accept) / step,
        "moving the cache": split.cache_move / step,
        "the host": split.host / step,
    }
    largest, *others = sorted(extra_steps.items(), key=lambda phase: -phase[1])
    listed = ", ".join(f"{name} {steps:.2f}" for name, steps in others)
    return (
        f"{largest[0].capitalize()} limits the speed-up most: a round yields {tau.mean:.2f} tokens and costs one "
        f"autoregressive step plus {largest[1]:.2f} steps for this; other extra costs, in steps: {listed}."
    )


def list_absences(report: Report) -> list[str]:
    """Return a line for each part that was not measured, then those on contamination."""
    several = has_several_drafts(report)
    absences = [
        f"{f'{draft.name} {name}' if several else name}: not measured: {reason}"
        for draft in report.drafts
        for name, reason in draft.not_measured.items()
    ]
    if not any(mode.split_ms for mode in report.overall.modes.values()):
        absences.append("parts of a round: not measured: evaluation.phases=true times them")
    return absences + describe_contamination(report)


def describe_contamination(report: Report) -> list[str]:
    """Return a line for each distinct result of the check, with the drafts that it holds for.

    The list is empty if the check was not requested for any draft.
    """
    drafts: dict[str, list[str]] = {}
    for name, check in report.setup.prompts.contamination.items():
        drafts.setdefault(_describe_check(check, report.setup.prompts.count), []).append(name)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in drafts.items()]


def _describe_check(check: Contamination, count: int) -> str:
    if not check.checked:
        return f"not checked for held-out prompts in the training data: {check.reason}."
    if not check.count:
        return f"none of the {count} held-out prompts is in the training data."
    ids = ", ".join(check.ids[:3]) + (", ..." if check.count > 3 else "")
    verb = "is" if check.count == 1 else "are"
    return f"{check.count} of the {count} held-out prompts {verb} in the training data ({ids})."


def explain_undecided(report: Report) -> list[str]:
    """Return a line per cause of undecided verdicts: the gap, and how to decide them."""
    verdicts = [mode.verdict for mode in report.overall.modes.values()]
    gaps = {
        f"{verdict.near_tie_gap:.3g} logits is wider than the {verdict.explained_gap:.3g}"
        for verdict in verdicts
        if verdict.lossless is LosslessVerdict.undecided
    }
    dtype = report.setup.device.dtype
    hint = (
        "one-token passes differ from a single pass over the same tokens"
        if dtype == "float32"
        else "decode with device.precision=float32"
    )
    return [f"undecided: a near-tie gap of {gap} that {dtype} explains in this target; {hint}." for gap in sorted(gaps)]


def describe_training(report: Report) -> list[str]:
    """Return a sentence for each draft whose training left a curve."""
    return [f"{draft.name}: {describe_curve(draft.training)}" for draft in report.drafts if draft.training]


def describe_curve(points: list[CurvePoint]) -> str:
    """Say whether tau still rises, and while it does, what twice the tokens would give.

    >>> describe_curve([CurvePoint(tokens=100 * n, tau=2.0) for n in range(3)])
    'too few evaluations to tell whether tau still rises: 3, and 7 are needed; lower interval.eval.'
    """
    line = fit_rise(points)
    if line is None:
        return (
            f"too few evaluations to tell whether tau still rises: {len(points)}, and "
            f"{2 * MIN_FITTED_POINTS - 1} are needed; lower interval.eval."
        )
    trend, prediction = Trend.from_slope(line.slope), ""
    if trend is Trend.rising:
        prediction = f"; at twice the tokens about {format_estimate(predict_tau(points, 2 * points[-1].tokens))}"
    return (
        f"tau {trend.value}: {_format_slope(line.slope)} a million tokens over the last {len(take_last_half(points))} "
        f"of {len(points)} evaluations, up to {points[-1].tokens:,} tokens{prediction}."
    )


def _format_slope(slope: Estimate) -> str:
    """Format a slope, which is tiny for a long run, with two significant digits.

    >>> _format_slope(Estimate(mean=0.00021, ci95=[-0.0001, 0.00052]))
    '+0.00021 [-0.00010, +0.00052]'
    """
    mean, low, high = (f"{x:+#.2g}".rstrip(".") for x in (slope.mean, *(slope.ci95 or ())))
    return f"{mean} [{low}, {high}]"


def _list_rules(report: Report, *, lossy: bool = False) -> list[str]:
    """Return the rules that verify drafts, or only the lossy ones of them."""
    verdicts = [view.mode.verdict for view in list_modes(report) if view.draft]
    return list(dict.fromkeys(v.verification for v in verdicts if v.lossy or not lossy))


def _join_words(items: list[str]) -> str:
    """Join items as in `one, two and three`.

    >>> _join_words(["one", "two", "three"])
    'one, two and three'
    """
    *before, last = items or [""]
    return f"{', '.join(before)} and {last}" if before else last
