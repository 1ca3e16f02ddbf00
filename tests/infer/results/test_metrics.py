"""The figures of a report are those computed by hand here, with intervals over prompts, paired by prompt."""

from dataclasses import replace

import numpy as np
import pytest

from infer.results.metrics import (
    acceptance_by_position,
    estimate_gain,
    estimate_metric,
    has_tree_rounds,
    take_percentiles,
)
from infer.results.records import Exactness, LogitTolerance, ModeResult
from infer.results.schema import LosslessVerdict, Mismatch
from tests.support.reports.sample_reports import prompt_result


def build_answer(prompt_id, accepted, *, drafted=None, depth=3, round_s=0.5, tokens=None):
    return prompt_result(
        prompt={"id": prompt_id, "category": f"of {prompt_id}"},
        ids=list(range(tokens or 1 + sum(accepted) + len(accepted))),
        accepted=accepted,
        drafted=drafted or [depth] * len(accepted),
        prefill_s=0.25,
        round_s=[round_s] * len(accepted),
    )


def build_plain_answer(prompt_id, tokens):
    return build_answer(prompt_id, [0] * (tokens - 1), depth=0, round_s=0.4)


def build_mode(*answers, depth=3):
    return ModeResult(prompt_results=list(answers), depth=depth)


# 3 rounds that emit 4 + 1 + 2 = 7 tokens, and 2 rounds that emit 3 + 1 = 4.
CHAIN = build_mode(build_answer("a", [3, 0, 1]), build_answer("b", [2, 0]))
PLAIN = build_mode(build_plain_answer("a", 8), build_plain_answer("b", 5), depth=0)


def test_acceptance_length_is_a_ratio_of_sums_that_counts_the_targets_token():
    assert estimate_metric("acceptance_length", CHAIN, PLAIN).mean == pytest.approx(11 / 5)
    assert estimate_metric("acceptance_length", PLAIN, PLAIN).mean == 1


def test_intervals_are_over_questions_not_over_their_turns():
    rng = np.random.default_rng(0)
    first = [build_answer(f"q{i}", rng.integers(0, 4, 6).tolist()) for i in range(12)]
    again = [
        replace(t, prompt=replace(t.prompt, id=f"{t.prompt.id}#2", turn=1)) for t in first
    ]  # of the same questions
    apart = [replace(t, prompt=replace(t.prompt, question=t.prompt.id)) for t in again]
    single, repeated, separate = (
        estimate_metric("acceptance_length", build_mode(*answers), build_mode(*answers))
        for answers in (first, first + again, first + apart)
    )
    assert repeated.mean == pytest.approx(single.mean)
    assert repeated.ci95 == pytest.approx(single.ci95)  # a turn that repeats the first tells nothing new
    assert separate.ci95[1] - separate.ci95[0] < 0.8 * (single.ci95[1] - single.ci95[0])
    ours = build_mode(*first, *again)
    worse = build_mode(*(replace(t, generation=build_answer("", [0] * 6).generation) for t in first + again))
    gain = estimate_gain("acceptance_length", ours, worse, (ours, ours))
    assert gain.ci95 == pytest.approx([bound - 1 for bound in single.ci95])


def test_acceptance_rate_counts_drafted_tokens():
    assert estimate_metric("acceptance_rate", CHAIN, PLAIN).mean == pytest.approx(6 / 15)
    assert estimate_metric("acceptance_rate", PLAIN, PLAIN) is None


def test_acceptance_by_position_is_marginal_and_conditional():
    shares = acceptance_by_position(CHAIN)
    assert shares.marginal == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert shares.conditional == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    assert acceptance_by_position(build_mode(build_answer("a", [0, 0]))).conditional == [0.0, None, None]


def test_speed_counts_delivered_tokens_and_acceptance_counts_accepted_ones():
    cut, base = build_mode(build_answer("a", [3, 3], tokens=6)), build_mode(build_plain_answer("a", 6), depth=0)
    assert estimate_metric("tokens_per_s", cut, base).mean == pytest.approx(5 / 1.0)
    assert estimate_metric("acceptance_length", cut, base).mean == 4
    assert estimate_metric("delivered_per_round", cut, base).mean == 5 / 2
    one_token = build_mode(build_plain_answer("a", 1), depth=0)
    assert estimate_metric("delivered_per_round", one_token, one_token) is None


def test_speedup_is_the_ratio_of_two_rates():
    # 11 tokens in 5 rounds of 0.5 s, against one token in 0.4 s.
    assert estimate_metric("speedup", CHAIN, PLAIN).mean == pytest.approx((11 / 2.5) / (1 / 0.4))
    end_to_end = (13 / (0.5 + 2.5)) / (13 / (0.5 + 11 * 0.4))
    assert estimate_metric("speedup_e2e", CHAIN, PLAIN).mean == pytest.approx(end_to_end)
    assert estimate_metric("speedup", PLAIN, PLAIN).ci95 == pytest.approx([1, 1])


def test_a_gain_is_a_paired_difference():
    worse = build_mode(build_answer("a", [2, 0, 0, 1]), build_answer("b", [1, 0, 0]))
    length = estimate_gain("acceptance_length", CHAIN, worse, (PLAIN, PLAIN))
    assert length.mean == pytest.approx(11 / 5 - 11 / 7)
    same = estimate_gain("speedup", CHAIN, CHAIN, (PLAIN, PLAIN))
    assert same.ci95 == pytest.approx([0, 0])


def test_acceptance_rates_of_tree_and_chain_are_not_subtracted():
    tree = build_mode(build_answer("a", [3, 0, 1], drafted=[8] * 3), build_answer("b", [2, 0], drafted=[8] * 2))
    assert has_tree_rounds(tree)
    assert not has_tree_rounds(CHAIN)
    assert estimate_gain("acceptance_rate", tree, CHAIN, (PLAIN, PLAIN)) is None
    assert estimate_gain("acceptance_rate", tree, tree, (PLAIN, PLAIN)).mean == 0


def test_latency_between_tokens_is_that_computed_by_hand():
    assert build_answer("a", [3, 3], tokens=6).figures.itl_ms == pytest.approx(1000 / 5)
    assert build_answer("a", [], tokens=1).figures.itl_ms is None
    assert take_percentiles([None]) is None
    assert take_percentiles([1.0, None, 3.0]).p50 == pytest.approx(2)


NEAR, FAR = (Mismatch(prompt_id=prompt_id, position=7, logit_gap=gap) for prompt_id, gap in (("a", 0.01), ("b", 0.5)))


@pytest.mark.parametrize(
    ("mismatches", "near_tie_gap", "exact_arithmetic", "verdict"),
    [
        ([], 0.1, False, LosslessVerdict.yes),
        ([NEAR], 0.1, False, LosslessVerdict.yes),
        ([NEAR, FAR], 0.1, False, LosslessVerdict.no),
        ([NEAR], 0.1, True, LosslessVerdict.no),
        # A gap wider than explained decides nothing, except in fp32, where a divergence does.
        ([], 0.3, False, LosslessVerdict.undecided),
        ([NEAR, FAR], 0.3, False, LosslessVerdict.undecided),
        ([], 0.3, True, LosslessVerdict.undecided),
        ([NEAR], 0.3, True, LosslessVerdict.no),
    ],
)
def test_divergences_are_lossless_within_an_explained_gap(mismatches, near_tie_gap, exact_arithmetic, verdict):
    tolerance = LogitTolerance(near_tie_gap=near_tie_gap, explained_gap=0.2, exact_arithmetic=exact_arithmetic)
    exactness = Exactness(mismatches=mismatches, tolerance=tolerance)
    assert exactness.judge("greedy").lossless == verdict


def test_a_category_is_judged_by_its_own_divergences():
    tolerance = LogitTolerance(near_tie_gap=0.1, explained_gap=0.2, exact_arithmetic=False)
    both = Exactness(mismatches=[NEAR, FAR], tolerance=tolerance)
    judged = both.judge("greedy")
    assert (judged.mismatched_prompts, judged.divergences_beyond_gap) == (2, 1)
    near = replace(CHAIN, exactness=both).select_category("of a")
    assert near.exactness.judge("greedy").lossless == LosslessVerdict.yes
