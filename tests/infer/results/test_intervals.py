"""The 95 % intervals of tau and of a gain in tau hold a known truth 95 % of times.

Prompts differ in acceptance, by a Beta distribution; a round accepts geometrically, cut at a depth;
an easy prompt needs fewer rounds, as an answer of fixed length does. The truth is the ratio of the
exact expectations.
"""

import numpy as np
import pytest

from infer.results.intervals import bootstrap_t, ratio_of_means

DEPTH, LEAST, MORE = 5, 8, 40  # rounds of a prompt: LEAST, and MORE trials with 1 - acceptance
EASE = (4, 2)  # Beta parameters of a draft's acceptance on a prompt
KEPT_SHARE = (9, 2)  # and of the share of it that a worse draft keeps
REPETITIONS = 2000
MARK = pytest.mark.system
PROMPT_COUNTS = [pytest.param(24, marks=MARK), 48, pytest.param(100, marks=MARK)]


def compute_moments(*betas):
    """Return E[a^k] of a product of independent Beta variables, k = 0 to DEPTH + 1."""
    of_each = [np.cumprod([1, *((a + k) / (a + b + k) for k in range(DEPTH + 1))]) for a, b in betas]
    return np.prod(of_each, axis=0)


def compute_true_tau(*betas):
    moment = compute_moments(*betas)
    rounds = LEAST + MORE * (1 - moment[1])
    tokens = sum((LEAST + MORE) * moment[k] - MORE * moment[k + 1] for k in range(DEPTH + 1))
    return tokens / rounds


def draw_rounds(rng, acceptance):
    """Return the tokens and rounds of each prompt of each repetition."""
    rounds = LEAST + rng.binomial(MORE, 1 - acceptance)
    reached = acceptance[..., None] ** np.arange(DEPTH + 1)
    shares = np.append(-np.diff(reached), reached[..., -1:], axis=-1)  # of 0, 1, ... accepted
    counts = rng.multinomial(rounds, shares)
    return np.stack([counts @ np.arange(DEPTH + 1) + rounds, rounds], -1).astype(float)


def measure_coverage(samples, truth, **kwargs):
    intervals = np.array([bootstrap_t(rows, **kwargs).ci95 for rows in samples])
    return np.mean((intervals[:, 0] <= truth) & (truth <= intervals[:, 1]))


@pytest.mark.parametrize("num_prompts", PROMPT_COUNTS)
def test_intervals_of_tau_hold_the_truth(num_prompts):
    rng = np.random.default_rng(num_prompts)
    samples = draw_rounds(rng, rng.beta(*EASE, (REPETITIONS, num_prompts)))
    assert ratio_of_means(samples.mean((0, 1))[None]) == pytest.approx(compute_true_tau(EASE), abs=0.01)
    assert 0.93 <= measure_coverage(samples, compute_true_tau(EASE), support=(1.0, np.inf)) <= 0.97


@pytest.mark.parametrize("num_prompts", PROMPT_COUNTS)
def test_intervals_of_a_paired_gain_hold_the_truth(num_prompts):
    rng = np.random.default_rng(num_prompts)
    better = rng.beta(*EASE, (REPETITIONS, num_prompts))
    worse = better * rng.beta(*KEPT_SHARE, better.shape)
    samples = np.concatenate([draw_rounds(rng, better), draw_rounds(rng, worse)], axis=-1)

    def difference(means):
        return ratio_of_means(means[..., :2]) - ratio_of_means(means[..., 2:])

    truth = compute_true_tau(EASE) - compute_true_tau(EASE, KEPT_SHARE)
    assert difference(samples.mean((0, 1))[None]) == pytest.approx(truth, abs=0.01)
    assert 0.93 <= measure_coverage(samples, truth, statistic=difference) <= 0.97


def test_intervals_are_defined_without_spread_and_with_few_prompts():
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
    rows = draw_rounds(np.random.default_rng(3), np.full(16, 0.6))
    assert bootstrap_t(rows) == bootstrap_t(rows.copy())
