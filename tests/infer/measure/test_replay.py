"""Trajectory replay yields the rounds of decoding without decoding."""

from dataclasses import replace

import pytest
import torch

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder
from infer.engine.row_tensors import tensor_bytes
from infer.measure.acceptance import AcceptanceCounter, build_comb
from infer.measure.replay import Replay, collect_replay_texts, count_on_policy, decoding_starts
from models.device.memory_trace import MemoryTracer
from models.drafts.ngram import NgramDraft
from models.trees.sampling_config import SamplingConf
from models.trees.tree import tree_from_paths
from tests.support.models.methods import CASES
from tests.support.models.tiny import batch_of, chain, learn, sampled_texts, static, tree
from tests.support.models.watching import watch_rounds

pytestmark = pytest.mark.no_shapes

NEW = 24
GREEDY = SamplingConf()
COUPLED = SamplingConf(temperature=0.8, top_p=0.95, seed=5)
SHAPES = {"chain": chain(3), "static": static(), "dynamic": tree()}


@pytest.fixture(scope="module")
def prompts(target):
    return [
        EvalPrompt(id=f"{i}-{cut}", category="all", ids=text[:cut])
        for i, text in enumerate(sampled_texts(target, count=3, length=24))
        for cut in (4, 9)
    ]


@pytest.fixture(scope="module")
def drafts(target):
    """Return a draft of each kind of state, trained a little: some tokens are accepted, some refused."""
    batch, by_name = batch_of(sampled_texts(target, count=4, length=24)), {"ngram": NgramDraft()}
    for name in ("eagle3", "medusa", "hydra++", "draft model"):
        draft = CASES[name].build(target)
        learn(draft, target, batch, steps=12, lr=CASES[name].lr)
        by_name[name] = draft.requires_grad_(False)
    return by_name


def count_decoded(target, draft, shape, prompts, sampling):
    """Decode; return the accepted draft tokens of every round, prompt by prompt."""
    slots = max(len(prompt.ids) for prompt in prompts) + NEW
    decoder = Decoder(target, draft, shape, sampling=sampling, slots=slots, batch=len(prompts))
    generations = decoder.decode(
        [p.ids for p in prompts], row_ids=[p.row_id for p in prompts], max_new_tokens=NEW, eos_ids=target.eos_ids
    )
    return [row.accepted for row in generations]


def replay_lengths(target, draft, shapes, prompts, sampling):
    texts = collect_replay_texts(
        target,
        prompts,
        sampling=sampling,
        max_new_tokens=NEW,
        layers=draft.needs.layers,
        lookahead=max(shape.max_path_length for shape in shapes.values()),
    )
    return Replay(target, draft, texts, sampling=sampling).accepted_lengths(shapes)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "hydra++", "draft model", "ngram"])
def test_replayed_rounds_are_those_of_decoding(target, drafts, prompts, name, sampling):
    draft = drafts[name]
    shapes = {"chain": chain(3)} if name == "ngram" else SHAPES
    replayed = replay_lengths(target, draft, shapes, prompts, sampling)
    total = 0
    for shape in shapes:
        accepted = count_decoded(target, draft, shapes[shape], prompts, sampling)
        assert [lengths[decoding_starts(lengths)].tolist() for lengths in replayed[shape]] == accepted
        total += sum(map(sum, accepted))
        length = count_on_policy(replayed[shape]).sum(0)
        assert length[1] == sum(map(len, accepted))
        assert length[0] == sum(map(sum, accepted)) + length[1]
    assert total > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_look_at_the_same_history(target, drafts, prompts, temperature):
    sampling = SamplingConf(temperature=temperature, repetition_penalty=1.4, presence_penalty=0.5, seed=2)
    shapes, draft = {"dynamic": tree()}, drafts["draft model"]
    replayed = replay_lengths(target, draft, shapes, prompts, sampling)["dynamic"]
    accepted = count_decoded(target, draft, tree(), prompts, sampling)
    assert [lengths[decoding_starts(lengths)].tolist() for lengths in replayed] == accepted
    assert sum(map(sum, accepted)) > 0


def test_an_answer_ends_where_decoding_ends(target, drafts, prompts, monkeypatch):
    draft = drafts["eagle3"]
    (text,) = collect_replay_texts(
        target, prompts[:1], sampling=GREEDY, max_new_tokens=NEW, layers=draft.needs.layers, lookahead=0
    )
    end = int(text.ids[text.prompt_length + 12])
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", end)
    replayed = replay_lengths(target, draft, {"tree": tree()}, prompts, GREEDY)["tree"]
    assert len(replayed[0]) <= 12 < NEW - 1
    assert [lengths[decoding_starts(lengths)].tolist() for lengths in replayed] == count_decoded(
        target, draft, tree(), prompts, GREEDY
    )


def test_an_answer_of_one_token_takes_no_round(target, drafts, prompts):
    draft = drafts["eagle3"]
    texts = collect_replay_texts(
        target, prompts[:2], sampling=GREEDY, max_new_tokens=NEW, layers=draft.needs.layers, lookahead=3
    )
    replay = Replay(target, draft, [replace(texts[0], answer_length=1), texts[1]], sampling=GREEDY)
    alone = Replay(target, draft, texts[1:], sampling=GREEDY)
    no_rounds, rounds = replay.accepted_lengths({"tree": tree()})["tree"]
    assert no_rounds.tolist() == []
    assert rounds.tolist() == alone.accepted_lengths({"tree": tree()})["tree"][0].tolist()
    assert torch.equal(replay.count_acceptance(3, 4).hits, alone.count_acceptance(3, 4).hits)


def test_the_table_is_that_of_decoding_with_the_comb(target, drafts, prompts):
    draft, watched = drafts["eagle3"], AcceptanceCounter(3, 4)
    decoder = Decoder(target, draft, tree_from_paths(build_comb(3, 4)), sampling=GREEDY, slots=64)
    watch_rounds(decoder, lambda comb, emitted, _: watched.count_rounds(comb.ids, emitted))
    for prompt in prompts:
        decoder.decode([prompt.ids], row_ids=[prompt.row_id], max_new_tokens=NEW, eos_ids=target.eos_ids)
    texts = collect_replay_texts(
        target, prompts, sampling=GREEDY, max_new_tokens=NEW, layers=draft.needs.layers, lookahead=3
    )
    table = Replay(target, draft, texts, sampling=GREEDY).count_acceptance(3, 4)
    assert torch.equal(table.rounds, watched.rounds)
    assert torch.equal(table.hits, watched.hits)
    assert 0 < table.hits[:, 1:].sum() < table.rounds[0]


@pytest.mark.parametrize("name", ["eagle3", "hydra++", "draft model"])
def test_a_long_prompt_costs_a_row_little_more_than_its_cache(target, drafts, name):
    """The text is read by one row, and not again by a row for each start."""
    (long,) = sampled_texts(target, count=1, length=200)
    draft, shape = drafts[name], chain(3)
    texts = collect_replay_texts(
        target,
        [EvalPrompt(id="long", category="all", ids=long)],
        sampling=GREEDY,
        max_new_tokens=NEW,
        layers=draft.needs.layers,
        lookahead=3,
    )
    cache_bytes = tensor_bytes(draft.new_state(texts[0].num_starts, len(long) + NEW + 3))
    with MemoryTracer([target.vocab_size]) as tracer, tracer.trace_phase("replay") as phase:
        Replay(target, draft, texts, sampling=GREEDY).accepted_lengths({"chain": shape})
    # A pass holds the caches before and after it, and scores with their mask, which is as wide as
    # the text. A text that each start reads for itself takes fourteen times the caches.
    assert phase.peak_bytes.total() < 4 * cache_bytes


@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows_at_a_time_are_replayed_to_the_same_lengths(target, drafts, prompts, rows, monkeypatch):
    """As many rows as the bytes of their caches allow are replayed at a time, but at least one."""
    draft, slots, shapes = drafts["draft model"], 64, {"tree": tree()}
    at_once = replay_lengths(target, draft, shapes, prompts[1:3], GREEDY)
    row_bytes = tensor_bytes(draft.new_state(1, slots))
    monkeypatch.setattr("infer.measure.replay.STATE_BYTES_PER_PASS", rows * row_bytes - 1)
    parts = replay_lengths(target, draft, shapes, prompts[1:3], GREEDY)
    assert [lengths.tolist() for lengths in parts["tree"]] == [lengths.tolist() for lengths in at_once["tree"]]
