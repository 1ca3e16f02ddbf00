"""Samples of the whole runtime have the target's own distribution, from round to round.

Five tokens of thousands of row ids, decoded as one batch. The first comes from the prompt's pass;
a round emits three at most, so that the fifth is always of a second round or a later one.
"""

import pytest
import torch

from infer.engine import steps
from models.trees.sampling_config import SamplingConf
from tests.support.decoding.agreeing import METHODS, SHAPES, noised
from tests.support.decoding.samples import (
    LEAST,
    compute_joint_distribution,
    compute_logits_behind,
    compute_p_values,
    sample_token_by_token,
    sample_tokens,
)

FEW, MANY = 300, 6000
WRONG = 0.4  # noise on the weights of a draft that seldom agrees
TEMPERATURES = [0.7, 1.0, 1.3]
RATIOS = [("rejection", shape) for shape in ("chain", "static", "dynamic", "dynamic, copied")]
RATIOS += [("block", "chain")]
PROVEN = [(*ratio, method) for ratio in RATIOS for method in METHODS]
PROVEN += [("rejection", "product", "medusa")]  # of independent heads
EVERY_TRIAL = [(*proven, temperature) for proven in PROVEN for temperature in TEMPERATURES]
QUICK_TRIALS = {  # each rule and shape, each draft and each temperature
    ("rejection", "chain", "eagle3", 0.7),
    ("rejection", "static", "draft model", 1.0),
    ("rejection", "dynamic", "eagle3, reduced", 1.3),
    ("rejection", "dynamic, copied", "eagle3", 1.0),
    ("rejection", "product", "medusa", 1.3),
    ("block", "chain", "draft model", 1.0),
    ("block", "chain", "medusa", 0.7),
}


TRIALS = [trial if trial in QUICK_TRIALS else pytest.param(*trial, marks=pytest.mark.system) for trial in EVERY_TRIAL]


@pytest.fixture(scope="module")
def behind(small):
    return compute_logits_behind(small)


@pytest.mark.parametrize(("rule", "shape", "method", "temperature"), TRIALS)
def test_ratio_tests_sample_the_target(small, drafts, behind, rule, shape, method, temperature):
    sampling = SamplingConf(temperature=temperature, seed=11)
    ids, accepted = sample_tokens(small, drafts[method], rule, shape, sampling)
    values = compute_p_values(ids, compute_joint_distribution(behind, sampling))
    assert 0.1 < accepted < 0.97
    assert min(values) > LEAST, values


@pytest.mark.parametrize("temperature", [0.7, *(pytest.param(t, marks=pytest.mark.system) for t in (1.0, 1.3))])
def test_coupled_rows_sample_the_target_and_are_those_of_their_key(small, drafts, behind, temperature):
    """Every tree and draft emits the rows of one-token-at-a-time decoding, so one test of those is enough."""
    sampling = SamplingConf(temperature=temperature, seed=11)
    plain = sample_token_by_token(small, sampling)
    values = compute_p_values(plain, compute_joint_distribution(behind, sampling))
    assert min(values) > LEAST, values
    for method in METHODS:
        for shape in SHAPES:
            ids, accepted = sample_tokens(small, drafts[method], "coupled", shape, sampling, FEW)
            assert torch.equal(ids, plain[:FEW]), (method, shape)
            assert 0.1 < accepted < 0.98, (method, shape)


@pytest.mark.parametrize(("rule", "shape"), [("coupled", "dynamic"), *RATIOS])
def test_cut_distributions_are_sampled_too(small, drafts, behind, rule, shape):
    sampling = SamplingConf(temperature=1.3, top_k=7, top_p=0.9, min_p=0.1, seed=11)
    ids, accepted = sample_tokens(small, drafts["eagle3"], rule, shape, sampling)
    values = compute_p_values(ids, compute_joint_distribution(behind, sampling))
    assert 0.1 < accepted < 0.97
    assert min(values) > LEAST, values


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(steps.COIN_NOISE, marks=pytest.mark.system),
        pytest.param(steps.DRAFT_NOISE, marks=pytest.mark.slow),
        pytest.param(steps.RESIDUAL_NOISE, marks=pytest.mark.slow),
    ],
)
def test_noise_that_is_used_again_in_a_later_round_is_caught(small, behind, monkeypatch, use):
    """Draws, coins or residual noise are the same in every round, with a draft that is often wrong."""
    draft, sampling = noised(small, noise=WRONG), SamplingConf(temperature=1.0, seed=11)
    joint = compute_joint_distribution(behind, sampling)
    ids, _ = sample_tokens(small, draft, "rejection", "chain", sampling, MANY)
    assert min(compute_p_values(ids, joint)) > LEAST

    def repeat_noise(honest):
        def keyed(seed, row_ids, turn, *positions):
            return honest(seed, row_ids, 0 if seed >> 48 == use else turn, *positions)

        return keyed

    for name in ("gumbel_noise", "uniform_noise"):
        monkeypatch.setattr(steps, name, repeat_noise(getattr(steps, name)))
    ids, _ = sample_tokens(small, draft, "rejection", "chain", sampling, MANY)
    values = compute_p_values(ids, joint)
    assert min(values) < 1e-6, values
