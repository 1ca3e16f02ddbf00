"""Sampling: the rule is transformers', the noise is Gumbel, keyed, and blind to batch and shape."""

import importlib.util
import math
import sys

import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from models import sampling
from models.errors import UserError
from models.sampling import SamplingConf, gumbel

ROWS = 20_000


def draw(rows=ROWS, *, vocab=12, count=2, seed=0, turn=0):
    """Noise of `count` positions of many rows."""
    positions = torch.arange(7, 7 + count).expand(rows, -1)
    return gumbel(seed, torch.arange(rows), turn, positions, torch.arange(vocab))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_k", [0, 5, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_warping_is_that_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    rule = SamplingConf(temperature=temperature, top_k=top_k, top_p=top_p).build()
    assert torch.equal(rule.warp(logits.view(8, 8, 50)).view(64, 50), wanted)


def test_temperature_zero_chooses_the_likeliest_token_without_noise():
    rule = SamplingConf(temperature=0.0, top_k=3, top_p=0.5).build()
    logits = torch.tensor([[[1.0, 4.0, 4.0, 2.0]]], dtype=torch.bfloat16)
    assert rule.greedy
    assert torch.equal(rule.warp(logits), logits.float())
    assert rule.warp(logits).argmax(-1).tolist() == [[1]]  # lowest id among equals


def test_noise_follows_the_gumbel_distribution_far_into_its_tail():
    noise = draw(vocab=50, count=1).flatten()
    assert stats.kstest(noise.double(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert noise.isfinite().all()
    tail = noise[noise > 7]  # 24 bits of a uniform number near 1 would leave few values there
    assert stats.kstest(tail.double() - 7, stats.expon.cdf).pvalue > 1e-3
    assert len(tail.unique()) > 0.99 * len(tail)


def test_sampled_tokens_follow_the_softmax():
    rule = SamplingConf(temperature=1.3, top_k=9, top_p=0.95).build()
    logits = torch.linspace(-2, 2, 12).roll(5)
    tokens = (rule.warp(logits.expand(ROWS, 2, -1)) + draw()).argmax(-1)
    probs = rule.warp(logits).double().softmax(-1)
    possible = probs > 0
    for position in range(2):
        counts = tokens[:, position].bincount(minlength=12)
        assert not counts[~possible].any()
        assert stats.chisquare(counts[possible], ROWS * probs[possible]).pvalue > 1e-3


@pytest.mark.parametrize("what", ["positions", "rows", "turns", "seeds", "high bits of the row"])
def test_noise_of_neighbouring_keys_is_independent(what):
    if what == "positions":
        pair = draw().unbind(1)
    elif what == "rows":
        pair = draw(ROWS + 1, count=1)[:, 0].unfold(0, 2, 1).unbind(-1)
    elif what == "high bits of the row":
        pair = [
            gumbel(
                0, torch.arange(ROWS) + (i << 32), 0, torch.ones(ROWS, 1).long(), torch.arange(12)
            )[:, 0]
            for i in (0, 1)
        ]
    else:
        pair = [draw(count=1, **{what[:-1]: value})[:, 0] for value in (0, 1)]
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    first, second = ((logits + noise[:, 3:7]).argmax(-1) for noise in pair)
    counts = (first * 4 + second).bincount(minlength=16)
    joint = torch.outer(logits.exp(), logits.exp()).flatten().double()
    assert stats.chisquare(counts, len(first) * joint / joint.sum()).pvalue > 1e-3


def test_noise_of_neighbouring_tokens_is_independent():
    noise = draw(count=1, vocab=8)[:, 0]
    correlation = torch.corrcoef(noise.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / ROWS**0.5


def test_noise_depends_on_the_key_and_not_on_the_batch():
    everything = draw(6, count=4, vocab=30)
    rows, kept = torch.tensor([4, 1]), torch.tensor([3, 29, 0])
    positions = torch.tensor([[9, 7], [10, 8]])
    part = gumbel(0, rows, 0, positions, kept)
    wanted = everything[rows[:, None], positions - 7][..., kept]
    torch.testing.assert_close(part, wanted, atol=1e-6, rtol=1e-6)


def test_a_turn_may_differ_by_row():
    positions = torch.tensor([[7], [7]])
    both = gumbel(0, torch.tensor([0, 0]), torch.tensor([0, 3]), positions, torch.arange(12))
    torch.testing.assert_close(both[0], draw(1, count=1)[0])
    torch.testing.assert_close(both[1], draw(1, count=1, turn=3)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_noise_and_warping_compile_into_one_graph(backend, monkeypatch):
    spec = importlib.util.spec_from_file_location("unchecked_sampling", sampling.__file__)
    plain = importlib.util.module_from_spec(spec)  # shape checks of pytest cannot be traced
    monkeypatch.setitem(sys.modules, spec.name, plain)
    spec.loader.exec_module(plain)
    rule = plain.SamplingConf(temperature=0.8, top_k=9, top_p=0.9, seed=3).build()

    def sample(logits, row_ids, positions):
        noise = plain.gumbel(rule.seed, row_ids, 0, positions, torch.arange(12))
        return noise, (rule.warp(logits) + noise).argmax(-1)

    args = (torch.randn(4, 2, 12), torch.tensor([5, 6, 7, 1 << 40]), torch.arange(8).view(4, 2))
    noise, tokens = torch.compile(sample, backend=backend, fullgraph=True)(*args)
    wanted_noise, wanted_tokens = sample(*args)
    torch.testing.assert_close(noise, wanted_noise, atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens, wanted_tokens)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_bad_settings_are_refused(key, value):
    with pytest.raises(UserError, match=rf"sampling\.{key}: must .*, got {value}; "):
        SamplingConf(**{key: value})
