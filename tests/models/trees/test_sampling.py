"""Sampling warps as transformers does, and with noise it follows the softmax."""

import itertools
import math
from functools import partial

import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.io.errors import UserError
from models.operators import DROPPED_SCORE
from models.trees.growth import ancestor_mask
from models.trees.keyed_noise import gumbel_noise, split_row_ids
from models.trees.sampling import History, warp_logits
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import VOCAB, tiny_target

ROWS = 20_000
PROMPT = 7  # tokens of a text that are its prompt


def draw_texts_and_logits(case):
    """Draw ids of eight texts, and logits, in some cases with ties or -inf."""
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (8, 12), generator=numbers)
    logits = torch.randn(8, VOCAB, generator=numbers) * 3
    if case == "ties":
        logits = logits.round()
    if case == "forbidden":
        logits[:, ::3] = -math.inf
    if case == "single token":
        logits[:, 1:] = -math.inf
    return ids, logits


def build_history(ids, prompt=PROMPT):
    in_text, in_answer = (torch.nn.functional.one_hot(part, VOCAB).bool().any(1) for part in (ids, ids[:, prompt:]))
    return History(in_text=in_text, in_answer=in_answer)


def warp_by_transformers(ids, logits, conf):
    """Apply its processors in the order of `generate`, with the presence penalty after the repetition penalty.

    It has no presence penalty: a bias of each answered token is the same.
    """
    if conf.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(conf.repetition_penalty)(ids, logits)
    if conf.presence_penalty:
        logits = torch.cat(
            [
                SequenceBiasLogitsProcessor({(t,): -conf.presence_penalty for t in row[PROMPT:]})(
                    torch.tensor([row]), scores[None]
                )
                for row, scores in zip(ids.tolist(), logits, strict=True)
            ]
        )
    steps = [TemperatureLogitsWarper(conf.temperature)]
    steps += [TopKLogitsWarper(conf.top_k)] if conf.top_k else []
    steps += [TopPLogitsWarper(conf.top_p)] if conf.top_p < 1 else []
    steps += [MinPLogitsWarper(conf.min_p)] if conf.min_p else []
    for step in steps:
        logits = step(ids, logits)
    return logits


def to_infinity(scores):
    """Return scores whose dropped tokens have those of transformers."""
    return scores.masked_fill(scores == DROPPED_SCORE, -math.inf)


ALONE = {
    "temperature": (0.7, 1.0, 1.3),
    "top_k": (1, 5, 500),
    "top_p": (0.9, 0.3, 1e-6),
    "min_p": (0.02, 0.3, 1.0),
    "repetition_penalty": (1.3, 0.7),
    "presence_penalty": (0.5, -2.0),
}
OPTIONS = [{key: value} for key, values in ALONE.items() for value in values]
OPTIONS += [
    dict(zip(ALONE, values, strict=True))
    for values in itertools.product((0.6, 1.2), (0, 8), (1.0, 0.8), (0.0, 0.1), (1.0, 1.4), (0.0, 0.7))
]


@pytest.mark.parametrize("case", ["plain", "ties", "forbidden", "single token"])
def test_warping_is_that_of_transformers(case, monkeypatch):
    """Every option alone and every combination gives bit-equal logits, if it sorts equal ones in their order."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    ids, logits = draw_texts_and_logits(case)
    history = build_history(ids)
    for options in OPTIONS:
        conf = SamplingConf(**({"temperature": 1.0} | options))
        warped = warp_logits(conf, logits, history)
        assert torch.equal(to_infinity(warped), warp_by_transformers(ids, logits, conf)), options


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_a_greedy_rule_applies_penalties_and_no_other_option(repetition_penalty):
    ids, logits = draw_texts_and_logits("plain")
    more = {"repetition_penalty": repetition_penalty, "presence_penalty": 0.4}
    rule = SamplingConf(temperature=0.0, top_k=3, top_p=0.5, min_p=0.3, **more)
    expected = warp_by_transformers(ids, logits, SamplingConf(temperature=1.0, **more))
    assert torch.equal(warp_logits(rule, logits, build_history(ids)), expected)


def test_generate_has_the_same_order_of_options():
    """The logits are those of a tiny model's `generate` with all options that it has."""
    options = {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
    conf = SamplingConf(temperature=0.7, **options)
    model = tiny_target(seed=0).model
    ids = torch.randint(1, VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=0.7,
        max_new_tokens=6,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        history = build_history(output.sequences[:, : 9 + step], prompt=9)
        assert torch.equal(to_infinity(warp_logits(conf, logits.float(), history)), scores)


def test_the_history_of_a_tree_is_that_of_each_path():
    """For random trees and texts, it is as if each node's text were read from its beginning."""
    numbers = torch.Generator().manual_seed(4)
    for nodes in (1, 4, 9):
        ids, _ = draw_texts_and_logits("plain")
        parents = torch.stack(
            [
                torch.tensor(
                    [int(torch.randint(-1, max(i, 1), (), generator=numbers)) if i else -1 for i in range(nodes)]
                )
                for _ in ids
            ]
        )
        drawn = torch.randint(0, VOCAB, (len(ids), nodes + 1), generator=numbers)
        history = build_history(ids).on_path(drawn, ancestor_mask(parents))
        for row in range(len(ids)):
            for node in range(nodes + 1):
                path, here = [int(drawn[row, node])], node
                while here:
                    here = int(parents[row, here - 1]) + 1
                    path.append(int(drawn[row, here]))
                text = torch.cat([ids[row], torch.tensor(path)])[None]
                expected = build_history(text)
                assert torch.equal(history.in_text[row, node], expected.in_text[0])
                assert torch.equal(history.in_answer[row, node], expected.in_answer[0])


def test_a_history_grows_by_the_emitted_tokens_alone():
    ids, _ = draw_texts_and_logits("plain")
    new = torch.randint(0, VOCAB, (8, 5), generator=torch.Generator().manual_seed(4))
    count = torch.arange(8) % 6
    history = build_history(ids).add(new, count)
    for row in range(8):
        expected = build_history(torch.cat([ids[row], new[row, : count[row]]])[None])
        assert torch.equal(history.in_text[row], expected.in_text[0])
        assert torch.equal(history.in_answer[row], expected.in_answer[0])


def test_sampled_tokens_follow_the_softmax():
    rule = SamplingConf(temperature=1.3, top_k=9, top_p=0.95)
    logits = torch.linspace(-2, 2, 12).roll(5)
    positions = torch.arange(7, 9).expand(ROWS, -1)
    noise = gumbel_noise(0, split_row_ids(range(ROWS)), 0, positions, torch.arange(12))
    tokens = (warp_logits(rule, logits.expand(ROWS, 2, -1)) + noise).argmax(-1)
    probs = warp_logits(rule, logits).double().softmax(-1)
    possible = probs > 0
    for position in range(2):
        counts = tokens[:, position].bincount(minlength=12)
        assert not counts[~possible].any()
        assert stats.chisquare(counts[possible], ROWS * probs[possible]).pvalue > 1e-3


@pytest.mark.no_shapes
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_noise_and_warping_compile_into_a_single_graph(backend):
    rule = SamplingConf(temperature=0.8, top_k=9, top_p=0.9, seed=3)

    def sample(logits, row_limbs, positions):
        noise = gumbel_noise(rule.seed, row_limbs, 0, positions, torch.arange(12))
        return noise, (warp_logits(rule, logits) + noise).argmax(-1)

    args = (torch.randn(4, 2, 12), split_row_ids([5, 6, 7, 1 << 40]), torch.arange(8).view(4, 2))
    noise, tokens = torch.compile(sample, backend=backend, fullgraph=True)(*args)
    expected_noise, expected_tokens = sample(*args)
    torch.testing.assert_close(noise, expected_noise, atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-6),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_bad_settings_are_refused(key, value):
    with pytest.raises(UserError, match=rf"sampling\.{key}: must .*, got {value}; "):
        SamplingConf(**{key: value})
