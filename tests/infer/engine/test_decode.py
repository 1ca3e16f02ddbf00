"""Decoding emits the target's own tokens, whatever the draft and the tree."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from data.features.target_pass import build_target_pass
from infer.engine import steps
from infer.engine.admission import pad_and_start
from infer.engine.answers import generate_answers
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from infer.verify.greedy_and_coupled import walk_choices
from infer.verify.rejection_and_block import RejectionRule
from models.device.opening import can_compile
from models.drafts.base import ReadPrompts
from models.drafts.ngram import NgramDraft, graft_chain
from models.targets.language_model import TargetOutput
from models.trees.growth import Proposal
from models.trees.sampling import Sampler
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE
from tests.support.models.family_models import family_target, partly_agreeing
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU, batch_of, chain, mixed, new_draft, static, tiny_target, tree

GREEDY = SamplingConf()
SHAPES = {"chain": chain(4), "static": static(), "dynamic": tree(), "mixed": mixed()}
NEW = 32


def cut_prompts(texts):
    return [text[:cut] for text, cut in zip(texts, (4, 5, 6, 7, 9, 11, 8, 10), strict=True)]


def decode_each(decoder, prompts, **more):
    """Decode one prompt at a time; the row id is its number."""
    settings = {"max_new_tokens": NEW} | more
    return [decoder.decode([p], row_ids=[i], **settings)[0] for i, p in enumerate(prompts)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("penalty", [1.4, 0.8])
def test_a_greedy_answer_with_a_repetition_penalty_is_that_of_transformers(target, learned, shape, penalty):
    """The penalty of a node looks at the node's own path, and at the prompt."""
    draft, texts = learned
    prompts = [text[:cut] for text, cut in zip(texts, (14, 5, 9, 22), strict=False)]
    sampling = SamplingConf(repetition_penalty=penalty)
    decoder = Decoder(target, draft, SHAPES[shape], sampling=sampling, slots=64, batch=3)
    generations = decoder.decode(prompts, row_ids=[0, 1, 2, 3], max_new_tokens=24)
    free = Decoder(target, sampling=GREEDY, slots=64, batch=3)
    assert [row.ids for row in generations] != [
        row.ids for row in free.decode(prompts, row_ids=[0, 1, 2, 3], max_new_tokens=24)
    ]
    for prompt, row in zip(prompts, generations, strict=True):
        expected = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, repetition_penalty=penalty
        )
        assert row.ids == expected[0, len(prompt) :].tolist()
    assert sum(sum(row.accepted) for row in generations) > 0


def test_training_answers_are_those_of_each_prompt_alone(target, learned):
    """Batches are formed by length; the position of a prompt keys its noise."""
    prompts = cut_prompts(learned[1])
    sampling = SamplingConf(temperature=1.0, seed=1)
    alone = decode_each(Decoder(target, sampling=sampling, slots=64), prompts, eos_ids=target.eos_ids)
    answers = generate_answers(target, prompts, max_new_tokens=NEW, sampling=sampling, batch=3)
    assert dict(answers) == {position: row.ids for position, row in enumerate(alone)}


def test_draws_coins_and_residuals_of_a_ratio_test_have_noise_of_their_own(target, monkeypatch):
    seeds = []
    for name in ("gumbel_noise", "uniform_noise"):
        noise = getattr(steps, name)
        monkeypatch.setattr(steps, name, lambda seed, *at, noise=noise: seeds.append(seed) or noise(seed, *at))
    sampling = SamplingConf(temperature=1.0)
    decoder = Decoder(target, new_draft(target), chain(2), sampling=sampling, slots=64, acceptance_rule=RejectionRule())
    decode_each(decoder, [[7, 8, 9]])
    first, *rounds = seeds  # the target's first token has the seed of the user
    assert first == sampling.seed
    assert len(set(rounds)) == 3
    assert first not in rounds


def test_ngram_lookup_copies_what_repeats(target):
    decoder = Decoder(target, NgramDraft(), chain(4), sampling=GREEDY, slots=96)
    (looping,) = decode_each(decoder, [[7, 8, 9] * 4], max_new_tokens=64)
    (plain,) = decode_each(Decoder(target, sampling=GREEDY, slots=96), [[7, 8, 9] * 4], max_new_tokens=64)
    assert looping.ids == plain.ids
    assert sum(looping.accepted) > 0


def test_a_mixed_tree_accepts_what_either_half_alone_would(target, learned):
    """Copied tokens hang where the draft's own tree ends, or beside it."""
    draft, texts = learned
    prompts = [text[:12] for text in texts]
    grown = decode_each(Decoder(target, draft, tree(), sampling=GREEDY, slots=64), prompts)
    copied = decode_each(Decoder(target, NgramDraft(), chain(4), sampling=GREEDY, slots=64), prompts)
    shape = replace(tree(), ngram_tokens=4)
    both = decode_each(Decoder(target, draft, shape, sampling=GREEDY, slots=64), prompts)
    firsts = zip(both, grown, copied, strict=True)
    assert all(b.accepted[0] >= max(g.accepted[0], c.accepted[0]) for b, g, c in firsts)
    assert sum(len(row.accepted) for row in both) < sum(len(row.accepted) for row in grown)


def test_a_copied_chain_goes_on_where_the_grown_tree_ends():
    grown = Proposal(ids=torch.tensor([[7, 8, 9]]), parents=torch.tensor([[-1, -1, 1]]))
    both = graft_chain(grown, torch.tensor([[8, 9, 5, 6]]))
    assert both.ids.tolist() == [[7, 8, 9, 8, 9, 5, 6]]
    assert both.parents.tolist() == [[-1, -1, 1, -1, 1, 2, 5]]
    # the target wants 8, 9, 5, 6, 4: all but the last are in the tree, partly in each half
    choice = torch.tensor([[8, 0, 9, 5, 0, 0, 6, 4]])
    accepted = walk_choices(both, choice, depth=4)
    assert accepted.ids.tolist() == [[8, 9, 5, 6, 4]]
    assert accepted.nodes.tolist() == [[0, 2, 3, 6, 7]]


def read_prompts(ids, lengths, first):
    """Return prompts to a draft that reads nothing of the target."""
    output = TargetOutput(hidden=torch.zeros(*ids.shape, 1), captured=None)
    return ReadPrompts(ids=ids, lengths=lengths, first_token=first, target_output=output)


@pytest.mark.parametrize("period", [1, 2, 3, 5, 16])
def test_ngram_lookup_repeats_a_period_that_is_shorter_than_the_copy(period):
    """Row 0 repeats its last tokens; row 1 repeats none, and copies the root."""
    texts = torch.tensor([[*range(1, period + 1)] * 3, [*range(1, 3 * period + 1)]])
    lengths = torch.full((2,), 3 * period)
    first = torch.tensor([1, 3 * period + 1])
    draft = NgramDraft()
    state = draft.start(draft.new_state(2, 3 * period + 2), read_prompts(texts, lengths, first))
    for depth in (1, 4, 16, 64):
        proposal = draft.propose(state, tree=chain(depth), sampler=Sampler(rule=GREEDY))
        repeated = [1 + (1 + i) % period for i in range(depth)]
        assert proposal.ids.tolist() == [repeated, [3 * period + 1] * depth]


def test_ngram_lookup_copies_after_the_longest_match_and_of_equal_ones_after_the_latest():
    texts = torch.tensor([[1, 2, 3, 11, 9, 3, 12, 8, 1, 2], [2, 3, 11, 9, 2, 3, 12, 8, 7, 2]])
    draft = NgramDraft()
    state = draft.start(draft.new_state(2, 12), read_prompts(texts, torch.full((2,), 10), torch.tensor([3, 3])))
    proposal = draft.propose(state, tree=chain(1), sampler=Sampler(rule=GREEDY))
    assert proposal.ids.tolist() == [[11], [12]]


@pytest.mark.parametrize("shape", [*SHAPES, "none", "n-gram"])
def test_every_tensor_of_a_rounds_state_is_contiguous(target, shape):
    """A view of one row has other strides than a copy for each row of a batch."""
    draft = {"none": None, "n-gram": NgramDraft()}.get(shape, new_draft(target))
    grown = {"none": NO_TREE, "n-gram": chain(4)}.get(shape, SHAPES.get(shape))
    decoder = Decoder(target, draft, grown, sampling=GREEDY, slots=64, batch=2)
    state, _, _ = pad_and_start(decoder.session, [[3, 4, 5], [6, 7]], [0, 1])
    with torch.no_grad():
        for _ in range(2):
            state, output = decoder.session.run_round(state, longest=16)
            tensors = [t for t in tree_leaves((state, output)) if isinstance(t, torch.Tensor)]
            assert len(tensors) > 5
            assert all(tensor.is_contiguous() for tensor in tensors)


def test_ngram_lookup_reads_nothing_out_of_bounds_for_a_row_without_work():
    state = NgramDraft().new_state(2, 12)  # a batch with free rows is proposed for as a whole
    proposal = NgramDraft().propose(state, tree=chain(3), sampler=Sampler(rule=GREEDY))
    assert proposal.ids.tolist() == [[-1] * 3] * 2


@pytest.mark.no_shapes  # compiled calls do not pass through the checks
@torch.no_grad()
def test_each_size_of_the_cache_has_graphs_of_its_own(fresh_compiler):
    """A prompt is read into a view of the first slots, which is as long in every cache, with other strides."""
    target = tiny_target(seed=0, device=replace(CPU, compiles=True, backend="eager"), layers=2)
    before = target.device.count_graphs()
    for slots, graphs in [(100, 2), (200, 4), (100, 4)]:  # prompt and round
        decoder = Decoder(target, None, NO_TREE, sampling=SamplingConf(), slots=slots)
        decoder.decode([[5, 9, 2]], row_ids=[0], max_new_tokens=4)
        assert target.device.count_graphs() - before == graphs


@pytest.mark.no_shapes  # compiled calls do not pass through the checks
@torch.no_grad()
def test_no_call_of_a_graph_checks_the_weights_of_the_target(fresh_compiler, monkeypatch):
    """Dynamo names them by the path on which the code reaches them; the fingerprint is checked in their place."""
    kept, plain_compile = [], torch.compile

    def compile_watched(function, *, options, **settings):
        keep = options["guard_filter_fn"] if options else lambda guards: [True] * len(guards)

        def keep_watched(guards):
            mask = keep(guards)
            kept.extend(guard.name for guard, is_kept in zip(guards, mask, strict=True) if is_kept)
            return mask

        return plain_compile(function, options={"guard_filter_fn": keep_watched}, **settings)

    monkeypatch.setattr(torch, "compile", compile_watched)
    target = tiny_target(seed=0, device=replace(CPU, compiles=True, backend="eager"), layers=2)
    decoder = Decoder(target, NgramDraft(), chain(3), sampling=GREEDY, slots=64)
    decoder.decode([[5, 9, 2]], row_ids=[0], max_new_tokens=4)
    build_target_pass(target, compiled=True)(target, [1], batch_of([[5, 9, 2, 4]]))
    assert [name for name in kept if "_parameters" in name or "_buffers" in name] == []
    assert {name for name in kept if name.endswith("fingerprint")} == {
        "program.target.fingerprint",
        "target.fingerprint",
    }


LONG = [[5 + i % 50 for i in range(500)], [7, 9, 11], [3 + i % 40 for i in range(130)], [8] * 70]


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_rounds_over_the_filled_part_of_a_long_cache_emit_the_same_tokens(target, learned, shape):
    """The longest row ends first, so that later rounds see less than what its last one wrote."""
    draft, _ = learned
    answers, slots_seen = [], set()
    for sees_all in (True, False):
        decoder = Decoder(target, draft, SHAPES[shape], sampling=GREEDY, slots=640, batch=3)
        decoder.session.reads_views = not sees_all
        if not sees_all:
            watch_slots(decoder.session, slots_seen)
        generations = decoder.decode(LONG, row_ids=range(4), max_new_tokens=[4, 80, 40, 20])
        answers.append([(row.ids, row.accepted) for row in generations])
    assert answers[0] == answers[1]
    assert min(slots_seen) < 200 < 500 < max(slots_seen)


@torch.no_grad()
def test_a_draft_model_proposes_the_same_after_a_view_of_its_cache(target):
    """It reads its prompt, and grows its first tree, in the first slots alone."""
    draft, answers = CASES["draft model"].build(target), []
    for sees_all in (True, False):
        decoder = Decoder(target, draft, SHAPES["dynamic"], sampling=GREEDY, slots=640)
        decoder.session.reads_views = not sees_all
        answers.append([(row.ids, row.accepted) for row in decode_each(decoder, LONG)])
    assert answers[0] == answers[1]


def watch_slots(session, slots_seen):
    """Collect the number of slots that each round reads."""
    fused = session._fused

    def watched(program, state):
        slots_seen.add(state.cache.num_slots)
        return fused(program, state)

    session._fused = watched


@pytest.mark.slow
@pytest.mark.no_shapes  # compiled calls do not pass through the checks
@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("family", ["llama3", "qwen2", "gpt_oss", "starcoder2"])  # without biases, and with
@torch.no_grad()
def test_prompts_of_all_lengths_are_compiled_for_models_with_and_without_biases(fresh_compiler, family):
    prompts, answers = [[5 + i % 50 for i in range(length)] for length in (3, 1, 40, 130)], []
    for compiles in (True, False):
        target = family_target(family, device=replace(CPU, compiles=compiles))
        decoder = Decoder(target, NgramDraft(), chain(3), sampling=GREEDY, slots=192)
        with target.device.expect_graphs(list_graphs(decoder.session, map(len, prompts)), print) as budget:
            answers.append([row.ids for row in decode_each(decoder, prompts, max_new_tokens=8)])
        assert budget is None or budget.unannounced == 0
    assert answers[0] == answers[1]


@pytest.mark.no_shapes  # compiled calls do not pass through the checks
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])  # gemma3: windows
@torch.no_grad()
def test_prompts_and_views_of_all_lengths_share_a_graph(fresh_compiler, family):
    devices = (replace(CPU, compiles=is_compiled, backend="eager") for is_compiled in (True, False))
    compiled, eager = (family_target(family, device=device) for device in devices)
    draft = partly_agreeing(family, eager)
    prompts = [[5 + i % 50 for i in range(length)] for length in (60, 1, 140)]
    before = compiled.device.count_graphs()
    answers, reference = (
        Decoder(target, draft, chain(3), sampling=GREEDY, slots=640).decode(
            prompts, row_ids=range(3), max_new_tokens=100
        )
        for target in (compiled, eager)
    )
    # the prompts, the same for the draft, and the round
    assert compiled.device.count_graphs() - before == 3
    assert [(row.ids, row.accepted) for row in answers] == [(row.ids, row.accepted) for row in reference]
