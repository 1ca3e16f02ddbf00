"""Losing exactness is seen, counted and placed; rounding alone is not called a loss."""

import importlib
from dataclasses import replace

import pytest
import torch

from data.prompts import EvalPrompt
from infer.decode import Decoder
from infer.exactness import compare, near_tie_gap
from infer.stats import Trace
from models.drafts.ngram import NgramDraft
from models.sampling import SamplingConf
from models.tree import NO_TREE
from tests.tiny import CPU, LAYERS, chain, new_draft, tiny_target, tree

pytestmark = pytest.mark.usefixtures("many_calls")

NEW = 32
COUNT = 8


class Judged:
    """A target in one precision, its prompts, and what decoding one token at a time answers."""

    def __init__(self, dtype: torch.dtype, learned):
        self.target = tiny_target(seed=0, device=replace(CPU, dtype=dtype))
        texts = learned[1]
        self.draft = new_draft(self.target).to(dtype)
        self.draft.load_state_dict(learned[0].state_dict())
        self.prompts = [
            EvalPrompt(id=f"p{i}", category="all", ids=text[: 4 + i % 5])
            for i, text in enumerate(texts)
        ]
        self.plain = self.decoder(None)
        self.wanted, recorded = self.decode(self.plain)
        _, trees = self.decode(self.decoder(self.draft, tree()))
        self.gap = near_tie_gap(recorded, [trees])

    def decoder(self, draft, shape=NO_TREE, **sampling) -> Decoder:
        sampling = SamplingConf(**sampling)
        return Decoder(self.target, draft, shape, sampling=sampling, slots=64, layers=LAYERS)

    def decode(self, decoder):
        traces, recorded = [], []
        for prompt in self.prompts:
            record = []
            (done,) = decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id], max_new_tokens=NEW, record=record
            )
            traces.append(trace_of(prompt, done))
            recorded.append((torch.tensor(done.ids), torch.cat(record)))
        return traces, recorded

    def compare(self, traces):
        return compare(self.plain, self.prompts, self.wanted, traces, self.gap)


def trace_of(prompt, done) -> Trace:
    return Trace(
        prompt_id=prompt.id, category="all", depth=4, ids=done.ids, accepted=done.accepted,
        drafted=done.drafted, prefill_s=done.prefill_s, round_s=done.round_s,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def judged(request, learned):
    return Judged(request.param, learned)


@pytest.fixture
def one_percent_wrong(monkeypatch):
    """A runtime that takes the draft's token for the target's at one node in a hundred."""
    rule = importlib.import_module("infer.verify.walk")  # a function has that name too
    honest, seen, wrong = rule.walk, [0], []

    def walk(proposal, choice, depth):
        choice = choice.clone()
        for node, parent in enumerate(proposal.parents[0].tolist()):
            seen[0] += 1
            if seen[0] % 100 == 1 and choice[0, parent + 1] != proposal.ids[0, node]:
                choice[0, parent + 1] = proposal.ids[0, node]
                wrong.append(node)
        return honest(proposal, choice, depth)

    monkeypatch.setattr(rule, "walk", walk)
    return seen, wrong


def test_an_honest_runtime_is_lossless(judged):
    traces, _ = judged.decode(judged.decoder(judged.draft, tree()))
    assert sum(sum(trace.accepted) for trace in traces) > 0
    exactness = judged.compare(traces)
    assert exactness.lossless
    assert exactness.divergences_beyond_gap == 0
    assert judged.gap < 1.0  # near ties only: these logits span tens
    if exactness.exact_arithmetic:
        assert exactness.mismatched_prompts == 0
    else:
        assert judged.gap > 0


def test_a_draft_token_in_a_hundred_accepted_wrongly_is_seen(judged, one_percent_wrong):
    traces, _ = judged.decode(judged.decoder(judged.draft, tree()))
    seen, wrong = one_percent_wrong
    assert 0 < len(wrong) <= seen[0] / 100 + 1
    exactness = judged.compare(traces)
    assert not exactness.lossless
    assert 0 < exactness.divergences_beyond_gap <= len(wrong)
    assert 0 < exactness.mismatched_prompts < COUNT  # the others are exact matches, and counted so


def test_the_place_of_a_divergence_and_the_gap_there_are_the_targets(judged):
    """One token of one answer replaced by the target's second choice."""
    wanted = judged.wanted[2]
    prompt, place = judged.prompts[2], 9
    ids = [*prompt.ids, *wanted.ids[:place]]
    logits = judged.target.model(torch.tensor([ids])).logits[0, -1].float()
    first, second = logits.topk(2).indices.tolist()
    assert first == wanted.ids[place]
    changed = replace(wanted, ids=[*wanted.ids[:place], second])
    exactness = judged.compare([*judged.wanted[:2], changed])
    (divergence,) = exactness.divergences
    assert (divergence.prompt_id, divergence.position) == ("p2", place)
    assert divergence.logit_gap == pytest.approx(
        float(logits[first] - logits[second]), abs=1e-4 + judged.gap
    )


def test_a_wrong_first_token_is_seen(judged):
    wanted = judged.wanted[0]
    ids = [1 + wanted.ids[0] % 60, *wanted.ids[1:]]
    exactness = judged.compare([replace(wanted, ids=ids)])
    assert exactness.divergences[0].position == 0
    assert not exactness.lossless


@pytest.mark.parametrize("kept", [5, 31])
def test_an_answer_that_ends_too_early_is_seen(judged, kept):
    wanted = judged.wanted[0]
    exactness = judged.compare([replace(wanted, ids=wanted.ids[:kept])])
    assert [d.position for d in exactness.divergences] == [kept]
    assert not exactness.lossless


def test_equal_answers_have_no_divergence(judged):
    exactness = compare(judged.plain, judged.prompts, judged.wanted, judged.wanted, gap=0.0)
    assert exactness.divergences == []
    assert exactness.lossless


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_answers_are_judged_by_the_noise_that_made_them(judged, temperature):
    plain = judged.decoder(None, temperature=temperature)
    wanted, _ = judged.decode(plain)
    traces, _ = judged.decode(judged.decoder(NgramDraft(), chain(4), temperature=temperature))
    exactness = compare(plain, judged.prompts, wanted, traces, judged.gap)
    assert exactness.divergences_beyond_gap == 0
    changed = replace(wanted[0], ids=[*wanted[0].ids[:3], 1 + wanted[0].ids[3] % 60])
    (divergence,) = compare(plain, judged.prompts, wanted, [changed], judged.gap).divergences
    assert divergence.position == 3
    assert divergence.logit_gap > 0


def test_the_near_tie_gap_is_twice_the_99_9th_percentile():
    """Two modes of one prompt: the second leaves the first after two tokens."""
    ids = torch.tensor([4, 5, 6, 7])
    plain = [(ids, torch.zeros(4, 500))]
    same, other = torch.zeros(4, 500), torch.zeros(4, 500)
    same[0, 0] = 9.0  # of 2,500 the three largest are beyond: an outlier does not set the gap
    same[1, :2] = torch.tensor([0.25, -0.5])
    other[0, 0] = 0.125
    other[2:] = 100.0  # behind another prefix: not comparable
    gap = near_tie_gap(plain, [[(ids, same)], [(torch.tensor([4, 5, 8, 7]), other)]])
    # compared: three rows of the first, two of the second; moved: 9, 0.5, 0.25, 0.125, else 0
    assert gap == 2 * 0.125
    assert near_tie_gap(plain, [[(ids, torch.zeros(4, 500))]]) == 0.0
    assert near_tie_gap(plain, []) == 0.0
