"""When another level of a draft's chain pays, from its cost and the rounds that accept it."""

from collections.abc import Iterator, Sequence

from infer.measure.report_schema import ModeSection, Report
from infer.report.views import has_several_drafts


def count_paying_levels(accepted_shares: Sequence[float], level_steps: float) -> int:
    """Return how many levels of a chain pay, from the first on.

    `accepted_shares` has, for each level, the share of rounds that accept it, which is the tokens
    that it adds to a round; `level_steps` is what it adds to the cost of a round, in autoregressive
    steps. It pays if tokens over cost exceed the speed-up of the chain without it.

    >>> count_paying_levels([0.6, 0.4, 0.2], 0.3)  # speed-ups: 1, 1.6 / 1.3, 2.0 / 1.6
    2
    >>> count_paying_levels([0.2, 0.1], 0.3)
    0
    """
    tokens = round_steps = 1.0
    for level, share in enumerate(accepted_shares):
        if share <= level_steps * tokens / round_steps:
            return level
        tokens, round_steps = tokens + share, round_steps + level_steps
    return len(accepted_shares)


def describe_levels(report: Report) -> Iterator[str]:
    """Yield a sentence for each draft: what a level of its chain costs, and how many pay."""
    for draft in report.drafts:
        if (chain := draft.modes["chain"]) and (sentence := _describe_chain(chain)):
            yield f"{draft.name}: {sentence}" if has_several_drafts(report) else sentence


def _describe_chain(chain: ModeSection) -> str | None:
    """Return the sentence on a chain, or None if its costs or its acceptance are not known."""
    costs, shares = chain.costs_ms, chain.acceptance_by_position.marginal
    if costs is None or costs.level is None or not shares:
        return None
    step = costs.autoregressive_step
    # Verification of a few tokens may be timed as faster than that of one, by noise.
    verify_ms = max(0.0, costs.verify - step) / len(shares)
    level_steps = (costs.level + verify_ms) / step
    num_paying = count_paying_levels(shares, level_steps)
    verdict = f"{num_paying} of {len(shares)} pay, counted from the first"
    if num_paying == 0:
        verdict = (
            f"not even the first pays, which {shares[0]:.2f} of rounds accept: n-gram lookup alone "
            "or no speculation is the right answer"
        )
    if num_paying == len(shares):
        verdict = f"all {num_paying} pay, and a deeper chain may too"
    return (
        f"A level of the chain adds {level_steps:.2f} autoregressive steps to a round, "
        f"{costs.level / step:.2f} of them to draft it. It pays if the share of rounds that accept "
        f"it is above that times the speed-up without it: {verdict}."
    )
