"""Losing exactness is seen, counted and placed; rounding alone is not called a loss."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data.eval_prompts.prompts import EvalPrompt
from infer.engine import steps
from infer.engine.decode import Decoder
from infer.measure.exactness import (
    WidestDifferences,
    compare_answers,
    compute_reference_logits,
    derive_tolerance,
    logit_shortfall,
    measure_tolerance,
)
from infer.results.records import PromptResult
from infer.results.schema import LosslessVerdict
from infer.verify import greedy_and_coupled
from models.drafts.ngram import NgramDraft
from models.targets.cache import CacheMoves
from models.trees.sampling import gumbel_noise, warp_logits
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE
from tests.support.models.tiny import CPU, LAYERS, chain, new_draft, tiny_target, tree

pytestmark = pytest.mark.no_shapes

NEW = 32
COUNT = 8


class Judged:
    """A target in one precision, its prompts, and what decoding one token at a time answers."""

    def __init__(self, dtype: torch.dtype, learned):
        self.target = tiny_target(seed=0, device=replace(CPU, dtype=dtype))
        texts = learned[1]
        self.draft = new_draft(self.target).to(dtype)
        self.draft.load_state_dict(learned[0].state_dict())
        self.prompts = [EvalPrompt(id=f"p{i}", category="all", ids=text[: 4 + i % 5]) for i, text in enumerate(texts)]
        self.plain = self.decoder(None)
        self.measure()

    def measured(self):
        return measure_tolerance(self.plain, self.prompts[:2], max_new_tokens=NEW)

    def measure(self):
        self.wanted = self.decode(self.plain)
        self.by = self.measured()

    def decoder(self, draft, shape=NO_TREE, *, batch=1, **sampling) -> Decoder:
        sampling = SamplingConf(**sampling)
        return Decoder(self.target, draft, shape, sampling=sampling, slots=64, layers=LAYERS, batch=batch)

    def decode(self, decoder):
        done = decoder.decode(
            [prompt.ids for prompt in self.prompts],
            row_ids=[prompt.row_id for prompt in self.prompts],
            max_new_tokens=NEW,
        )
        return [trace_of(*pair) for pair in zip(self.prompts, done, strict=True)]

    def trees(self, *, batch=1) -> list[PromptResult]:
        return self.decode(self.decoder(self.draft, tree(), batch=batch))

    def compare(self, traces):
        return compare_answers(self.plain, self.wanted, traces, self.by)


def with_ids(result, ids) -> PromptResult:
    return replace(result, generation=replace(result.generation, ids=ids))


def trace_of(prompt, done) -> PromptResult:
    return PromptResult(prompt=prompt, generation=done)


@pytest.fixture(
    scope="module", params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.system)], ids=["fp32", "bf16"]
)
def judged(request, learned):
    return Judged(request.param, learned)


@pytest.fixture
def one_percent_wrong(monkeypatch):
    """A runtime that takes the draft's token for the target's at one node in a hundred."""
    honest, seen, wrong = greedy_and_coupled.walk_choices, [0], []

    def walk(proposal, choice, depth):
        choice = choice.clone()
        for node, parent in enumerate(proposal.parents[0].tolist()):
            seen[0] += 1
            if seen[0] % 100 == 1 and choice[0, parent + 1] != proposal.ids[0, node]:
                choice[0, parent + 1] = proposal.ids[0, node]
                wrong.append(node)
        return honest(proposal, choice, depth)

    monkeypatch.setattr(greedy_and_coupled, "walk_choices", walk)
    return seen, wrong


# --- planted faults of tree passes, and what they are planted in ---------------------------------


def moved_positions(honest):
    """Nodes read a position too far; the root, which one-token passes have too, does not."""
    return "node_depths", lambda sees: honest.node_depths(sees) + (honest.node_depths(sees) > 0)


def visible_siblings(honest):
    """Nodes see every node before them."""
    return "tree_mask", lambda lengths, sees, slots: honest.tree_mask(lengths, torch.ones_like(sees).tril(), slots)


def path_left_behind(honest):
    """What a round accepts stays where the tree stood."""

    def score(program, state):
        if state.rows.moves is not None:
            nowhere = torch.full_like(state.rows.moves.source, state.cache.garbage_slot)
            moves = CacheMoves(source=nowhere, destination=nowhere)
            state = replace(state, rows=replace(state.rows, moves=moves))
        return honest.score(program, state)

    return "score", score


def tree_of_another_row(honest):
    """All rows of a batch see as the first does; a row alone is right."""
    return "tree_mask", lambda lengths, sees, slots: honest.tree_mask(lengths, sees[:1].expand_as(sees), slots)


FAULTS = [moved_positions, visible_siblings, path_left_behind]


def plant(fault, monkeypatch):
    name, wrong = fault(SimpleNamespace(**vars(steps)))
    monkeypatch.setattr(steps, name, wrong)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.system)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tree_pass_wrong_beyond_the_gap_is_never_lossless(judged, fault, batch, monkeypatch):
    """The gap is measured with the fault in place, as a report does."""
    plant(fault, monkeypatch)
    assert judged.measured() == judged.by  # no tree has a part in it
    exactness = judged.compare(judged.trees(batch=batch))
    assert exactness.verdict == LosslessVerdict.no
    assert exactness.judge("exact").mismatched_prompts > COUNT / 2


def test_a_fault_of_batches_alone_is_seen_there_alone(judged, monkeypatch):
    plant(tree_of_another_row, monkeypatch)
    assert judged.compare(judged.trees()).verdict == LosslessVerdict.yes
    assert judged.compare(judged.trees(batch=4)).verdict == LosslessVerdict.no


def test_a_faulty_one_token_pass_leaves_the_verdict_undecided(judged, monkeypatch):
    """Trees that repeat the fault of their baseline agree with it, and with the target not."""

    def moved(honest):
        return "node_depths", lambda sees: honest.node_depths(sees) + 1

    plant(moved, monkeypatch)
    faulty = copy(judged)
    faulty.measure()
    assert faulty.by.near_tie_gap > 5 * faulty.by.explained_gap
    assert faulty.compare(faulty.wanted).verdict == LosslessVerdict.undecided
    assert faulty.compare(faulty.trees()).verdict in (LosslessVerdict.undecided, LosslessVerdict.no)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_honest_runtime_is_lossless(judged, batch):
    traces = judged.trees(batch=batch)
    assert sum(sum(trace.generation.accepted) for trace in traces) > 0
    exactness = judged.compare(traces)
    assert exactness.verdict == LosslessVerdict.yes
    assert exactness.mismatches_beyond_gap == 0
    if judged.by.exact_arithmetic:
        assert exactness.judge("exact").mismatched_prompts == 0


def test_a_draft_token_in_a_hundred_accepted_wrongly_is_seen(judged, one_percent_wrong):
    traces = judged.trees()
    seen, wrong = one_percent_wrong
    assert 0 < len(wrong) <= seen[0] / 100 + 1
    exactness = judged.compare(traces)
    assert exactness.verdict == LosslessVerdict.no
    assert 0 < exactness.mismatches_beyond_gap <= len(wrong)
    assert 0 < exactness.judge("exact").mismatched_prompts < COUNT  # the others are exact matches, and counted so


def test_the_place_of_a_divergence_and_the_gap_there_are_the_targets(judged):
    """One token of one answer replaced by the target's second choice.

    Two logits are compared, in a one-token pass and in a plain one: rounding explains so much.
    """
    wanted = judged.wanted[2]
    prompt, place = judged.prompts[2], 9
    ids = [*prompt.ids, *wanted.generation.ids[:place]]
    logits = judged.target.model(torch.tensor([ids])).logits[0, -1].float()
    first, second = logits.topk(2).indices.tolist()
    assert first == wanted.generation.ids[place]
    changed = with_ids(wanted, [*wanted.generation.ids[:place], second])
    exactness = judged.compare([*judged.wanted[:2], changed])
    (divergence,) = exactness.mismatches
    assert (divergence.prompt_id, divergence.position) == ("p2", place)
    assert divergence.logit_gap == pytest.approx(float(logits[first] - logits[second]), abs=judged.by.explained_gap)


@pytest.mark.parametrize("kept", [5, 31])
def test_an_answer_that_ends_too_early_is_seen(judged, kept):
    wanted = judged.wanted[0]
    exactness = judged.compare([with_ids(wanted, wanted.generation.ids[:kept])])
    assert [d.position for d in exactness.mismatches] == [kept]
    assert exactness.verdict == LosslessVerdict.no


def test_a_target_that_answers_differently_twice_is_not_held_against_the_draft(judged):
    """Where a draft's tokens are those that the target prefers, its other answer is rounding."""
    first, *others = judged.wanted
    ids = [*first.generation.ids[:3], first.generation.ids[3] + 1, *first.generation.ids[4:]]
    plain = [with_ids(first, ids), *others]
    found = compare_answers(judged.plain, plain, judged.wanted, judged.by)
    assert (found.mismatches[0].position, found.mismatches[0].logit_gap) == (3, 0.0)
    exact = judged.by.exact_arithmetic
    assert found.verdict == (LosslessVerdict.no if exact else LosslessVerdict.yes)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_answers_are_judged_by_the_noise_that_made_them(judged, temperature):
    plain = judged.decoder(None, temperature=temperature)
    wanted = judged.decode(plain)
    traces = judged.decode(judged.decoder(NgramDraft(), chain(4), temperature=temperature))
    exactness = compare_answers(plain, wanted, traces, judged.by)
    assert exactness.mismatches_beyond_gap == 0
    changed = with_ids(wanted[0], [*wanted[0].generation.ids[:3], 1 + wanted[0].generation.ids[3] % 60])
    (divergence,) = compare_answers(plain, wanted, [changed], judged.by).mismatches
    assert divergence.position == 3
    assert divergence.logit_gap > 0


WARPED = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.95}]


@pytest.mark.parametrize("warped", WARPED, ids=str)
def test_a_near_tie_at_the_border_of_what_is_sampled_is_one_as_any_other(warped):
    """Logits that rounding moves by a hundredth: what they then say is a fiftieth away."""
    rule = SamplingConf(temperature=0.7, **warped)
    draws, moved, differ = torch.Generator().manual_seed(0), 0.01, 0
    for number in range(800):
        logits = 2 * torch.randn(40, generator=draws)
        other = logits + moved * (2 * torch.rand(40, generator=draws) - 1)
        prompt = EvalPrompt(id=str(number), category="all", ids=[1, 2, 3])
        row, place, tokens = torch.tensor([prompt.row_id]), torch.tensor([[5]]), torch.arange(40)
        noise = gumbel_noise(0, row, 0, place, tokens)[0, 0]
        own, said = (int((warp_logits(rule, each) + noise).argmax()) for each in (logits, other))
        short = logit_shortfall(rule, logits, prompt, [7, 8, said], 2)
        assert 0 <= short <= 2 * moved + 1e-4
        differ += own != said
        unlikely = logit_shortfall(rule, logits, prompt, [7, 8, int(logits.argmin())], 2)
        assert unlikely > 2 * moved
    assert differ > 0


SHAPE = {"largest_logit": 8.0, "num_layers": 18, "hidden_size": 64}  # a walk of six steps


def test_the_near_tie_gap_is_twice_the_measured_gap_and_at_least_a_rounding_step():
    by = derive_tolerance(0.25, **SHAPE, dtype=torch.bfloat16)
    assert by.near_tie_gap == 2 * 0.25
    step = 2**-7 * 8.0
    assert by.explained_gap == pytest.approx(2 * step * 6, rel=1e-3)  # fp32's sums are in it
    assert not by.exact_arithmetic
    still = derive_tolerance(0.0, **SHAPE, dtype=torch.bfloat16)
    assert still.near_tie_gap == pytest.approx(2 * step, rel=1e-3)
    assert derive_tolerance(0.25, **SHAPE, dtype=torch.float32).exact_arithmetic


@pytest.mark.parametrize("sizes", [[2001], [1, 2000], [700] * 9, [3, 1], [1]])
def test_the_quantile_of_parts_is_that_of_all_of_them(sizes):
    """An outlier does not set the gap: two of 2,001 numbers are beyond the 99.9th percentile."""
    parts = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)).split(sizes)
    most = max(sum(sizes), 2500)
    kept = WidestDifferences(most=most)
    for part in parts:
        kept.add(part)
    count = sum(sizes)
    expected = torch.cat(parts).sort(descending=True).values[count - 1 - int(0.999 * (count - 1))]
    assert kept.quantile() == float(expected)
    assert len(kept.widest) <= most * 0.001 + 3


def test_rounding_alone_stays_within_what_the_precision_explains(judged):
    assert 0 < judged.by.near_tie_gap < judged.by.explained_gap
    assert judged.by.explained_gap < (1e-3 if judged.by.exact_arithmetic else 1.0)  # of logits to 6


@torch.no_grad()
def test_a_plain_reading_is_that_of_the_whole_model(judged):
    prompt, answer = judged.prompts[0].ids, judged.wanted[0].generation.ids
    ours = compute_reference_logits(judged.target, prompt, answer, slots=64)
    ids = torch.tensor([[*prompt, *answer]])
    theirs = judged.target.model(ids).logits[0, len(prompt) : -1].float()
    assert ours.shape == (len(answer) - 1, theirs.shape[1])
    torch.testing.assert_close(ours, theirs, atol=judged.by.explained_gap / 2, rtol=0)
