"""The figures of a report: computed by hand here, covered by their intervals, paired by prompt."""

from dataclasses import replace

import numpy as np
import pytest

from data.eval_prompts.prompts import EvalPrompt
from infer.measure.batched import average_passes
from infer.measure.evaluate import estimate_replay
from infer.measure.intervals import Estimate, bootstrap_t, ratio_of_means
from infer.measure.metrics import (
    acceptance_by_position,
    estimate_gain,
    estimate_metric,
    has_tree_rounds,
    inter_token_latency,
    is_looping,
    memory_bound_speedup,
    percentiles_in_ms,
)
from infer.measure.records import Exactness, LogitTolerance, ModeResult
from infer.measure.report_schema import LosslessVerdict, Mismatch, RoundCosts
from tests.support.made_report import prompt_result


def trace(prompt_id, accepted, *, drafted=None, depth=3, round_s=0.5, tokens=None):
    return prompt_result(
        prompt={"id": prompt_id},
        ids=list(range(tokens or 1 + sum(accepted) + len(accepted))),
        accepted=accepted,
        drafted=drafted or [depth] * len(accepted),
        depth=depth,
        prefill_s=0.25,
        round_s=[round_s] * len(accepted),
    )


def plain(prompt_id, tokens):
    return trace(prompt_id, [0] * (tokens - 1), depth=0, drafted=[0] * (tokens - 1), round_s=0.4)


PROMPTS = [
    EvalPrompt(id="a", category="near", ids=[0]),
    EvalPrompt(id="b", category="far", ids=[0]),
]
# 3 rounds that emit 4 + 1 + 2 = 7 tokens, and 2 rounds that emit 3 + 1 = 4.
CHAIN = [trace("a", [3, 0, 1]), trace("b", [2, 0])]
PLAIN = [plain("a", 8), plain("b", 5)]


def test_acceptance_length_is_a_ratio_of_sums_that_counts_the_targets_token():
    assert estimate_metric("acceptance_length", CHAIN, PLAIN).mean == pytest.approx(11 / 5)
    assert estimate_metric("acceptance_length", PLAIN, PLAIN).mean == 1


def test_acceptance_length_per_prompt_is_the_mean_of_the_prompts_own():
    own = estimate_metric("acceptance_length_per_prompt", CHAIN, PLAIN)
    assert own.mean == pytest.approx((7 / 3 + 4 / 2) / 2)
    silent = [*CHAIN, trace("c", [], tokens=1)]  # its only token came with the prefill
    with_it = estimate_metric("acceptance_length_per_prompt", silent, [*PLAIN, plain("c", 1)])
    assert with_it.mean == pytest.approx(own.mean)


def test_intervals_are_over_questions_not_over_their_turns():
    rng = np.random.default_rng(0)
    first = [trace(f"q{i}", rng.integers(0, 4, 6).tolist()) for i in range(12)]
    again = [
        replace(t, prompt=replace(t.prompt, id=f"{t.prompt.id}#2", turn=1)) for t in first
    ]  # of the same questions
    apart = [replace(t, prompt=replace(t.prompt, question=t.prompt.id)) for t in again]
    base = [plain(t.prompt.id, 5) for t in first + again]
    one, two, as_others = (
        estimate_metric("acceptance_length", traces, base)
        for traces in (first, first + again, first + apart)
    )
    assert two.mean == pytest.approx(one.mean)
    assert two.ci95 == pytest.approx(one.ci95)  # a turn that repeats the first tells nothing new
    assert as_others.ci95[1] - as_others.ci95[0] < 0.8 * (one.ci95[1] - one.ci95[0])
    worse = [replace(t, generation=trace("", [0] * 6).generation) for t in first + again]
    ours = estimate_gain("acceptance_length", first + again, worse, base)
    assert ours.ci95 == pytest.approx([bound - 1 for bound in one.ci95])


def test_memory_bound_speedup_by_hand():
    tau = Estimate(mean=3.0, ci95=[2.5, 3.5])
    chain = memory_bound_speedup(tau, draft_passes=4, bytes_ratio=0.125)
    assert (chain.mean, chain.ci95) == (2.0, pytest.approx([2.5 / 1.5, 3.5 / 1.5]))
    assert memory_bound_speedup(tau, draft_passes=0, bytes_ratio=0.0) == tau


def test_acceptance_rate_counts_drafted_tokens():
    assert estimate_metric("acceptance_rate", CHAIN, PLAIN).mean == pytest.approx(6 / 15)
    assert estimate_metric("acceptance_rate", PLAIN, PLAIN) is None


def test_acceptance_by_position():
    shares = acceptance_by_position(CHAIN)
    assert shares.marginal == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert shares.conditional == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    assert acceptance_by_position([trace("a", [0, 0])]).conditional == [0.0, None, None]


def test_speed_counts_kept_tokens_and_acceptance_counts_what_the_verifier_accepted():
    cut = trace("a", [3, 3], tokens=6)
    assert estimate_metric("tokens_per_s", [cut], [plain("a", 6)]).mean == pytest.approx(5 / 1.0)
    assert estimate_metric("acceptance_length", [cut], [plain("a", 6)]).mean == 4


def test_speedup_is_the_ratio_of_two_rates():
    # 11 tokens in 5 rounds of 0.5 s, against one token in 0.4 s.
    assert estimate_metric("speedup", CHAIN, PLAIN).mean == pytest.approx((11 / 2.5) / (1 / 0.4))
    whole = (13 / (0.5 + 2.5)) / (13 / (0.5 + 11 * 0.4))
    assert estimate_metric("speedup_e2e", CHAIN, PLAIN).mean == pytest.approx(whole)
    assert estimate_metric("speedup", PLAIN, PLAIN).ci95 == pytest.approx([1, 1])


def test_gain_is_paired_by_prompt_whatever_the_order():
    worse = [trace("b", [1, 0, 0]), trace("a", [2, 0, 0, 1])]
    length = estimate_gain("acceptance_length", CHAIN, worse, PLAIN)
    assert length.mean == pytest.approx(11 / 5 - 11 / 7)
    assert estimate_gain("acceptance_length", CHAIN, worse[::-1], PLAIN) == length
    assert estimate_gain("speedup", CHAIN, CHAIN, PLAIN).ci95 == pytest.approx([0, 0])


def test_acceptance_rates_of_tree_and_chain_are_not_subtracted():
    tree = [trace("a", [3, 0, 1], drafted=[8] * 3), trace("b", [2, 0], drafted=[8] * 2)]
    assert has_tree_rounds(tree)
    assert not has_tree_rounds(CHAIN)
    assert estimate_gain("acceptance_rate", tree, CHAIN, PLAIN) is None
    assert estimate_gain("acceptance_rate", tree, tree, PLAIN).mean == 0


def test_latency_by_hand():
    assert inter_token_latency(trace("a", [3, 3], tokens=6).generation) == pytest.approx(1.0 / 5)
    assert inter_token_latency(trace("a", [], tokens=1).generation) is None
    assert percentiles_in_ms([None]) is None
    assert percentiles_in_ms([0.001, None, 0.003]).p50 == pytest.approx(2)


def test_efficiency_predicts_from_tau_and_costs():
    costs = RoundCosts(draft=0.1, verify=0.4, autoregressive_step=0.25)
    assert costs.predicted_speedup(3.0) == pytest.approx(1.5)


def test_divergences_within_the_gap_are_lossless_except_in_exact_arithmetic():
    near = Mismatch(prompt_id="a", position=7, logit_gap=0.01)
    far = Mismatch(prompt_id="b", position=2, logit_gap=0.5)
    half = LogitTolerance(near_tie_gap=0.1, explained_gap=0.2, exact_arithmetic=False)
    whole = replace(half, exact_arithmetic=True)
    assert Exactness(mismatches=[near], tolerance=half).verdict == LosslessVerdict.yes
    assert Exactness(mismatches=[near], tolerance=whole).verdict == LosslessVerdict.no
    both = Exactness(mismatches=[near, far], tolerance=half)
    judged = both.judge("exact")
    assert (judged.mismatched_prompts, judged.divergences_beyond_gap) == (2, 1)
    assert both.verdict == LosslessVerdict.no
    apart = [replace(trace("a", [0]), prompt=prompt) for prompt in PROMPTS]
    mode = ModeResult(prompt_results=apart, exactness=both)
    assert mode.select_category("near").exactness.verdict == LosslessVerdict.yes


def test_a_gap_wider_than_explained_decides_nothing_but_in_fp32_a_divergence_does():
    wide = LogitTolerance(near_tie_gap=0.3, explained_gap=0.2, exact_arithmetic=False)
    apart = [Mismatch(prompt_id="a", position=1, logit_gap=gap) for gap in (0.01, 5.0)]
    for found in ([], apart[:1], apart):
        assert Exactness(mismatches=found, tolerance=wide).verdict == LosslessVerdict.undecided
    fp32 = replace(wide, exact_arithmetic=True)
    assert Exactness(mismatches=apart[:1], tolerance=fp32).verdict == LosslessVerdict.no
    assert Exactness(tolerance=fp32).verdict == LosslessVerdict.undecided


def test_delivered_tokens_leave_out_what_is_cut_off_behind_the_end():
    cut = trace("a", [3, 3], tokens=6)
    assert estimate_metric("acceptance_length", [cut], [plain("a", 6)]).mean == 4
    assert estimate_metric("delivered_per_round", [cut], [plain("a", 6)]).mean == 5 / 2
    assert estimate_metric("delivered_per_round", CHAIN, PLAIN).mean == pytest.approx(11 / 5)
    assert estimate_metric("delivered_per_round", [plain("a", 1)], [plain("a", 1)]) is None


def test_loops_are_an_eight_gram_three_times():
    assert is_looping([0, *range(8), *range(8), 9, *range(8)])
    assert not is_looping([*range(8), *range(8), 9])


def simulate(rng, num_prompts):
    """Tokens and rounds of prompts whose acceptance differs: some easy, most not."""
    share = rng.beta(4, 2, num_prompts)
    rounds = rng.integers(8, 40, num_prompts)
    accepted = [
        np.minimum(rng.geometric(1 - a, r) - 1, 5).sum() for a, r in zip(share, rounds, strict=True)
    ]
    return np.stack([accepted + rounds, rounds], 1).astype(float)


def test_bootstrap_t_covers_a_ratio_at_sixteen_prompts():
    rng = np.random.default_rng(1)
    truth = ratio_of_means(simulate(rng, 20_000).mean(0, keepdims=True))[0]
    intervals = [bootstrap_t(simulate(rng, 16)).ci95 for _ in range(200)]
    assert np.mean([low <= truth <= high for low, high in intervals]) >= 0.9


def test_bootstrap_t_covers_a_paired_difference():
    rng = np.random.default_rng(2)

    def pairs(num_prompts):
        first, second = simulate(rng, num_prompts), simulate(rng, num_prompts)
        return np.hstack([first * 1.5, first + second])

    def difference(means):
        return ratio_of_means(means[..., :2]) - ratio_of_means(means[..., 2:])

    truth = difference(pairs(20_000).mean(0, keepdims=True))[0]
    intervals = [bootstrap_t(pairs(16), difference).ci95 for _ in range(200)]
    assert np.mean([low <= truth <= high for low, high in intervals]) >= 0.9


def test_intervals_without_spread_or_with_few_prompts():
    same = np.array([[6.0, 2.0]] * 16)
    assert bootstrap_t(same).ci95 == [3, 3]
    assert bootstrap_t(same[:1]).ci95 is None
    assert bootstrap_t(np.zeros((16, 2))) is None
    low, high = bootstrap_t(np.array([[6.0, 2.0], [4.0, 2.0], [5.0, 3.0]])).ci95
    assert low < 15 / 7 < high < np.inf
    rare = np.array([[0.0, 9.0]] * 15 + [[4.0, 9.0]])  # most resamples miss the one that differs
    low, high = bootstrap_t(rare, support=(0.0, 1.0)).ci95
    assert low == 0
    assert 4 / 144 < high < 0.2


def test_intervals_repeat_exactly():
    rows = simulate(np.random.default_rng(3), 16)
    assert bootstrap_t(rows) == bootstrap_t(rows.copy())


def test_passes_of_different_answers_are_averaged_too():
    """Where sums of a batch have no fixed order, a pass may answer otherwise in other rounds."""
    short, long = trace("a", [3, 3], round_s=0.2), trace("a", [3, 1, 1], round_s=0.7)
    merged = average_passes(short, long)
    assert merged.generation.ids == short.generation.ids
    assert merged.generation.round_s == pytest.approx([(2 * 0.2 + 3 * 0.7) / 5] * 2)
    alike = average_passes(trace("a", [3, 0], round_s=0.2), trace("a", [3, 0], round_s=0.4))
    assert alike.generation.round_s == pytest.approx([0.3, 0.3])
    silent = trace("c", [], tokens=1)
    assert average_passes(silent, long) is silent


@pytest.mark.parametrize("turns", [2, 3])
def test_replayed_turns_of_a_question_count_as_one(turns):
    """Turns that say the same again do not make an interval narrower."""
    rng = np.random.default_rng(0)
    alone = [rng.integers(0, 4, 20) for _ in range(12)]
    again = [lengths for lengths in alone for _ in range(turns)]
    questions = [str(number) for number in range(12) for _ in range(turns)]
    as_one, expected = estimate_replay(again, questions), estimate_replay(alone, questions[::turns])
    assert as_one.tau.ci95 == pytest.approx(expected.tau.ci95)
    assert as_one.all_positions.ci95 == pytest.approx(expected.all_positions.ci95)
    apart = estimate_replay(again, [*map(str, range(12 * turns))])
    assert np.ptp(apart.tau.ci95) < 0.9 * np.ptp(as_one.tau.ci95)
