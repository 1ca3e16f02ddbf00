"""A loss of exactness is detected, counted and located; rounding alone is not called a loss."""

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
from models.trees.keyed_noise import gumbel_noise, split_row_ids
from models.trees.sampling import warp_logits
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE
from tests.support.models.tiny import CPU, LAYERS, chain, new_draft, tiny_target, tree

pytestmark = pytest.mark.no_shapes

NEW = 32
COUNT = 8


class ExactnessCase:
    """A target in one precision, its prompts, and the answers of decoding one token at a time."""

    def __init__(self, dtype: torch.dtype, learned):
        self.target = tiny_target(seed=0, device=replace(CPU, dtype=dtype))
        texts = learned[1]
        self.draft = new_draft(self.target).to(dtype)
        self.draft.load_state_dict(learned[0].state_dict())
        self.prompts = [EvalPrompt(id=f"p{i}", category="all", ids=text[: 4 + i % 5]) for i, text in enumerate(texts)]
        self.plain = self.build_decoder(None)
        self.measure_target()

    def measure_tolerance(self):
        return measure_tolerance(self.plain, self.prompts[:2], max_new_tokens=NEW)

    def measure_target(self):
        self.answers = self.decode_prompts(self.plain)
        self.tolerance = self.measure_tolerance()

    def build_decoder(self, draft, shape=NO_TREE, *, batch=1, **sampling) -> Decoder:
        sampling = SamplingConf(**sampling)
        return Decoder(self.target, draft, shape, sampling=sampling, slots=64, layers=LAYERS, batch=batch)

    def decode_prompts(self, decoder):
        generations = decoder.decode(
            [prompt.ids for prompt in self.prompts],
            row_ids=[prompt.row_id for prompt in self.prompts],
            max_new_tokens=NEW,
        )
        return [build_result(*pair) for pair in zip(self.prompts, generations, strict=True)]

    def decode_with_trees(self, *, batch=1) -> list[PromptResult]:
        return self.decode_prompts(self.build_decoder(self.draft, tree(), batch=batch))

    def judge_answers(self, traces):
        return compare_answers(self.plain, self.answers, traces, self.tolerance)


def replace_ids(result, ids) -> PromptResult:
    return replace(result, generation=replace(result.generation, ids=ids))


def build_result(prompt, generation) -> PromptResult:
    return PromptResult(prompt=prompt, generation=generation)


@pytest.fixture(
    scope="module", params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.system)], ids=["fp32", "bf16"]
)
def case(request, learned):
    return ExactnessCase(request.param, learned)


@pytest.fixture
def one_percent_wrong(monkeypatch):
    """Let the runtime take the draft's token for the target's at one node in a hundred."""
    honest, nodes_walked, wrong = greedy_and_coupled.walk_choices, [0], []

    def walk(proposal, choice, depth):
        choice = choice.clone()
        for node, parent in enumerate(proposal.parents[0].tolist()):
            nodes_walked[0] += 1
            if nodes_walked[0] % 100 == 1 and choice[0, parent + 1] != proposal.ids[0, node]:
                choice[0, parent + 1] = proposal.ids[0, node]
                wrong.append(node)
        return honest(proposal, choice, depth)

    monkeypatch.setattr(greedy_and_coupled, "walk_choices", walk)
    return nodes_walked, wrong


# --- planted faults of tree passes ----------------------------------------------------------------


def shift_node_positions(honest):
    """Read nodes a position too far, but not the root, which one-token passes have too."""
    return "node_depths", lambda sees: honest.node_depths(sees) + (honest.node_depths(sees) > 0)


def show_siblings(honest):
    """Let nodes see every node before them."""
    return "tree_mask", lambda lengths, sees, slots: honest.tree_mask(lengths, torch.ones_like(sees).tril(), slots)


def drop_cache_moves(honest):
    """Leave the keys that a round accepts in the slots of the tree."""

    def verify(program, state):
        if state.rows.moves is not None:
            nowhere = torch.zeros_like(state.rows.moves.source)
            moves = CacheMoves(source=nowhere, destination=nowhere)
            state = replace(state, rows=replace(state.rows, moves=moves))
        return honest.verify(program, state)

    return "verify", verify


def share_mask_of_first_row(honest):
    """Give all rows of a batch the mask of the first; a row alone is right."""
    return "tree_mask", lambda lengths, sees, slots: honest.tree_mask(lengths, sees[:1].expand_as(sees), slots)


FAULTS = [shift_node_positions, show_siblings, drop_cache_moves]


def plant_fault(fault, monkeypatch):
    name, wrong = fault(SimpleNamespace(**vars(steps)))
    monkeypatch.setattr(steps, name, wrong)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.system)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tree_pass_wrong_beyond_the_gap_is_never_lossless(case, fault, batch, monkeypatch):
    """The gap is measured with the fault in place, as a report does."""
    plant_fault(fault, monkeypatch)
    assert case.measure_tolerance() == case.tolerance  # it is measured without trees
    exactness = case.judge_answers(case.decode_with_trees(batch=batch))
    assert exactness.verdict == LosslessVerdict.no
    assert exactness.judge("greedy").mismatched_prompts > COUNT / 2


def test_a_fault_of_batches_alone_is_detected_in_batches_alone(case, monkeypatch):
    plant_fault(share_mask_of_first_row, monkeypatch)
    assert case.judge_answers(case.decode_with_trees()).verdict == LosslessVerdict.yes
    assert case.judge_answers(case.decode_with_trees(batch=4)).verdict == LosslessVerdict.no


def test_a_faulty_one_token_pass_leaves_the_verdict_undecided(case, monkeypatch):
    """A tree that repeats the fault of its baseline agrees with it, but not with the target."""

    def shift_all_positions(honest):
        return "node_depths", lambda sees: honest.node_depths(sees) + 1

    plant_fault(shift_all_positions, monkeypatch)
    faulty = copy(case)
    faulty.measure_target()
    assert faulty.tolerance.near_tie_gap > 5 * faulty.tolerance.explained_gap
    assert faulty.judge_answers(faulty.answers).verdict == LosslessVerdict.undecided
    assert faulty.judge_answers(faulty.decode_with_trees()).verdict in (LosslessVerdict.undecided, LosslessVerdict.no)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_honest_runtime_is_lossless(case, batch):
    traces = case.decode_with_trees(batch=batch)
    assert sum(sum(trace.generation.accepted) for trace in traces) > 0
    exactness = case.judge_answers(traces)
    assert exactness.verdict == LosslessVerdict.yes
    assert exactness.mismatches_beyond_gap == 0
    if case.tolerance.exact_arithmetic:
        assert exactness.judge("greedy").mismatched_prompts == 0


def test_a_draft_token_in_a_hundred_accepted_wrongly_is_detected(case, one_percent_wrong):
    traces = case.decode_with_trees()
    nodes_walked, wrong = one_percent_wrong
    assert 0 < len(wrong) <= nodes_walked[0] / 100 + 1
    exactness = case.judge_answers(traces)
    assert exactness.verdict == LosslessVerdict.no
    assert 0 < exactness.mismatches_beyond_gap <= len(wrong)
    assert 0 < exactness.judge("greedy").mismatched_prompts < COUNT  # the others are exact matches, and counted so


def test_a_divergence_has_its_position_and_the_gap_of_the_targets_logits(case):
    """One token of one answer is replaced by the target's second choice.

    A logit of a one-token pass is compared with that of a plain pass, so rounding explains a difference.
    """
    expected = case.answers[2]
    prompt, position = case.prompts[2], 9
    ids = [*prompt.ids, *expected.generation.ids[:position]]
    logits = case.target.model(torch.tensor([ids])).logits[0, -1].float()
    first, second = logits.topk(2).indices.tolist()
    assert first == expected.generation.ids[position]
    changed = replace_ids(expected, [*expected.generation.ids[:position], second])
    exactness = case.judge_answers([*case.answers[:2], changed])
    (divergence,) = exactness.mismatches
    assert (divergence.prompt_id, divergence.position) == ("p2", position)
    assert divergence.logit_gap == pytest.approx(
        float(logits[first] - logits[second]), abs=case.tolerance.explained_gap
    )


@pytest.mark.parametrize("length", [5, 31])
def test_an_answer_that_ends_too_early_is_detected(case, length):
    expected = case.answers[0]
    exactness = case.judge_answers([replace_ids(expected, expected.generation.ids[:length])])
    assert [d.position for d in exactness.mismatches] == [length]
    assert exactness.verdict == LosslessVerdict.no


def test_a_target_that_answers_differently_twice_is_not_counted_against_the_draft(case):
    """If the draft's tokens are those that the target prefers, a difference in the answer is rounding."""
    first, *others = case.answers
    ids = [*first.generation.ids[:3], first.generation.ids[3] + 1, *first.generation.ids[4:]]
    plain = [replace_ids(first, ids), *others]
    exactness = compare_answers(case.plain, plain, case.answers, case.tolerance)
    assert (exactness.mismatches[0].position, exactness.mismatches[0].logit_gap) == (3, 0.0)
    exact = case.tolerance.exact_arithmetic
    assert exactness.verdict == (LosslessVerdict.no if exact else LosslessVerdict.yes)


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_sampled_answers_are_judged_by_the_noise_of_their_draws(case, temperature):
    plain = case.build_decoder(None, temperature=temperature)
    expected = case.decode_prompts(plain)
    traces = case.decode_prompts(case.build_decoder(NgramDraft(), chain(4), temperature=temperature))
    exactness = compare_answers(plain, expected, traces, case.tolerance)
    assert exactness.mismatches_beyond_gap == 0
    changed = replace_ids(expected[0], [*expected[0].generation.ids[:3], 1 + expected[0].generation.ids[3] % 60])
    (divergence,) = compare_answers(plain, expected, [changed], case.tolerance).mismatches
    assert divergence.position == 3
    assert divergence.logit_gap > 0


LONG = [{}, {"top_k": 5}, {"top_p": 0.8}]
WARPED = [{"min_p": 0.1}, {"top_k": 20, "top_p": 0.95}, *(pytest.param(rule, marks=pytest.mark.slow) for rule in LONG)]


@pytest.mark.parametrize("warped", WARPED, ids=str)
def test_a_near_tie_at_the_border_of_top_k_top_p_or_min_p_is_one_like_any_other(warped):
    """Rounding moves the logits by 0.01, so the token chosen then is at most 0.02 short."""
    rule = SamplingConf(temperature=0.7, **warped)
    draws, moved, differ = torch.Generator().manual_seed(0), 0.01, 0
    for number in range(800):
        logits = 2 * torch.randn(40, generator=draws)
        other = logits + moved * (2 * torch.rand(40, generator=draws) - 1)
        prompt = EvalPrompt(id=str(number), category="all", ids=[1, 2, 3])
        row, position, tokens = split_row_ids([prompt.row_id]), torch.tensor([[5]]), torch.arange(40)
        noise = gumbel_noise(0, row, 0, position, tokens)[0, 0]
        own, chosen = (int((warp_logits(rule, each) + noise).argmax()) for each in (logits, other))
        short = logit_shortfall(rule, logits, prompt, [7, 8, chosen], 2)
        assert 0 <= short <= 2 * moved + 1e-4
        differ += own != chosen
        unlikely = logit_shortfall(rule, logits, prompt, [7, 8, int(logits.argmin())], 2)
        assert unlikely > 2 * moved
    assert differ > 0


SHAPE = {"largest_logit": 8.0, "num_layers": 18, "hidden_size": 64}  # a walk of six steps


def test_the_near_tie_gap_is_twice_the_measured_gap_and_at_least_a_rounding_step():
    tolerance = derive_tolerance(0.25, **SHAPE, dtype=torch.bfloat16)
    assert tolerance.near_tie_gap == 2 * 0.25
    step = 2**-7 * 8.0
    assert tolerance.explained_gap == pytest.approx(2 * step * 6, rel=1e-3)  # fp32's sums are in it
    assert not tolerance.exact_arithmetic
    still = derive_tolerance(0.0, **SHAPE, dtype=torch.bfloat16)
    assert still.near_tie_gap == pytest.approx(2 * step, rel=1e-3)
    assert derive_tolerance(0.25, **SHAPE, dtype=torch.float32).exact_arithmetic


@pytest.mark.parametrize("sizes", [[2001], [1, 2000], [700] * 9, [3, 1], [1]])
def test_the_quantile_of_parts_is_that_of_all_of_them(sizes):
    """An outlier does not set the gap: two of 2,001 numbers are beyond the 99.9th percentile."""
    parts = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)).split(sizes)
    most = max(sum(sizes), 2500)
    differences = WidestDifferences(most=most)
    for part in parts:
        differences.add(part)
    count = sum(sizes)
    expected = torch.cat(parts).sort(descending=True).values[count - 1 - int(0.999 * (count - 1))]
    assert differences.quantile() == float(expected)
    assert len(differences.widest) <= most * 0.001 + 3


def test_rounding_alone_stays_within_what_the_precision_explains(case):
    assert 0 < case.tolerance.near_tie_gap < case.tolerance.explained_gap
    assert case.tolerance.explained_gap < (1e-3 if case.tolerance.exact_arithmetic else 1.0)  # of logits to 6


@torch.no_grad()
def test_a_plain_reading_is_that_of_the_whole_model(case):
    prompt, answer = case.prompts[0].ids, case.answers[0].generation.ids
    ours = compute_reference_logits(case.target, prompt, answer, slots=64)
    ids = torch.tensor([[*prompt, *answer]])
    theirs = case.target.model(ids).logits[0, len(prompt) : -1].float()
    assert ours.shape == (len(answer) - 1, theirs.shape[1])
    torch.testing.assert_close(ours, theirs, atol=case.tolerance.explained_gap / 2, rtol=0)
