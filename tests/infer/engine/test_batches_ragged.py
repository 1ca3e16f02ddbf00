"""Rows that share a batch are decoded as if alone, whatever the others accept, and whenever they end."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from infer.engine.decode import Decoder, build_acceptance_rule
from infer.engine.phase_timer import PhaseTimer
from infer.engine.requests import Request
from infer.verify.config import Verification
from models.trees.sampling_config import SamplingConf
from tests.support.decoding.agreeing import METHODS, SHAPES, WORDS
from tests.support.models.watching import WatchedOperators

pytestmark = pytest.mark.no_shapes

SLOTS = 64
COUNT, BATCH = 20, 8
MODES = {
    "greedy": SamplingConf(),
    "coupled": SamplingConf(temperature=1.0, seed=4),
    "rejection": SamplingConf(temperature=1.0, seed=4),
    "block": SamplingConf(temperature=1.0, seed=4),
    "typical": SamplingConf(temperature=1.0, seed=4),
}
TREES = {"block": ["chain"], "rejection": ["chain", "static", "dynamic", "dynamic, copied"]}
CASES = [(rule, shape) for rule in MODES for shape in TREES.get(rule, SHAPES)]
RAGGED = [("greedy", "chain"), ("greedy", "dynamic, copied"), ("coupled", "static")]
RAGGED += [("coupled", "product"), ("rejection", "static"), ("rejection", "dynamic, copied")]
RAGGED += [("block", "chain"), ("typical", "dynamic")]
LEAST = [1, 3, BATCH]  # free rows for which prompts are read
PENALIZED = SamplingConf(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.4, min_p=0.02, top_p=0.95, seed=4)


@pytest.fixture(scope="module")
def requests():
    """Return prompts and limits of every length, long beside short."""
    numbers = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 30, (COUNT,), generator=numbers).tolist()
    prompts = [torch.randint(1, WORDS, (n,), generator=numbers).tolist() for n in lengths]
    return prompts, torch.randint(1, 17, (COUNT,), generator=numbers).tolist()


def build_decoder(target, draft, rule, shape, batch, sampling=None, **more):
    sampling = sampling or MODES[rule]
    return Decoder(
        target,
        draft,
        SHAPES[shape],
        sampling=sampling,
        slots=SLOTS,
        batch=batch,
        acceptance_rule=build_acceptance_rule(Verification(rule), sampling),
        **more,
    )


def decode_together(decoder, requests, *, backwards=False):
    """Return the answer and accepted counts of each request, in whichever order they are decoded."""
    prompts, limits = requests
    order = slice(None, None, -1 if backwards else 1)
    row_ids = [100 + i for i in range(len(prompts))]
    generations = decoder.decode(prompts[order], row_ids=row_ids[order], max_new_tokens=limits[order])
    return [(row.ids, row.accepted) for row in generations[order]]


def decode_alone(decoder, requests):
    """Decode each request in a call of its own."""
    generations = [
        decoder.decode([prompt], row_ids=[100 + i], max_new_tokens=limit)[0]
        for i, (prompt, limit) in enumerate(zip(*requests, strict=True))
    ]
    return [(row.ids, row.accepted) for row in generations]


@pytest.mark.parametrize(("rule", "shape"), RAGGED)
def test_rows_that_are_refilled_are_decoded_as_alone(small, drafts, requests, rule, shape):
    """Twenty requests go through eight slots; in the other order, rows have other neighbors and other slots."""
    draft = drafts[METHODS[RAGGED.index((rule, shape)) % len(METHODS)]]
    expected = decode_alone(build_decoder(small, draft, rule, shape, 1), requests)
    together = build_decoder(small, draft, rule, shape, BATCH)
    assert decode_together(together, requests) == expected == decode_together(together, requests, backwards=True)
    assert [len(ids) for ids, _ in expected] == requests[1]
    counts = [count for _, accepted in expected for count in accepted]
    assert 0.1 < sum(count > 0 for count in counts) / len(counts) < 0.99
    assert len(set(counts)) > 1  # ragged


@pytest.fixture(scope="module")
def token_by_token(small, requests):
    """Return the answers of one-token-at-a-time decoding, with penalties and without."""
    return [
        [ids for ids, _ in decode_alone(Decoder(small, sampling=sampling, slots=SLOTS), requests)]
        for sampling in (PENALIZED, replace(PENALIZED, repetition_penalty=1.0, presence_penalty=0.0))
    ]


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic, copied"])
def test_penalties_follow_each_rows_own_path(small, drafts, requests, token_by_token, shape):
    together = build_decoder(small, drafts["eagle3, reduced"], "coupled", shape, BATCH, PENALIZED)
    answers = decode_together(together, requests)
    assert [ids for ids, _ in answers] == token_by_token[0] != token_by_token[1]
    assert sum(sum(accepted) for _, accepted in answers) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", ["chain", "dynamic, copied"])
def test_a_finished_row_never_changes_another(small, drafts, method, shape):
    """A row ends at once, at the last slot of its cache, while its neighbor goes on for long."""
    alone, together = (build_decoder(small, drafts[method], "greedy", shape, batch) for batch in (1, 3))
    for limit in (1, 6):
        rows = ([[3, 4, 5], [5] * (SLOTS - limit), [7]], [40, limit, 30])
        assert decode_together(together, rows) == decode_alone(alone, rows)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_a_fused_round_emits_what_its_parts_emit(small, drafts, requests, rule, shape, batch):
    draft = drafts[METHODS[CASES.index((rule, shape)) % len(METHODS)]]
    prompts, limits = requests[0][:4], [9, 5, 8, 7]

    def run(*, fused):
        session = build_decoder(small, draft, rule, shape, batch)
        timer = None if fused else PhaseTimer(synchronize=session.target.device.synchronize)
        return session.decode(prompts, row_ids=list(range(4)), max_new_tokens=limits, phase_timer=timer)

    fused_rows, split_rows = run(fused=True), run(fused=False)
    for fused_row, split_row in zip(fused_rows, split_rows, strict=True):
        assert (fused_row.ids, fused_row.accepted, fused_row.drafted) == (
            split_row.ids,
            split_row.accepted,
            split_row.drafted,
        )
    assert sum(sum(row.accepted) for row in fused_rows) > 0
    assert {nodes for row in fused_rows for nodes in row.drafted} == {SHAPES[shape].size}


def count_rounds(answers):
    """Count each round once: the shares that its rows have in its time add up to 1."""
    return round(
        sum(
            share_s / round_s
            for answer in answers
            for share_s, round_s in zip(answer.share_s, answer.round_s, strict=True)
        )
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("rule", "shape", "idle"), [("greedy", "chain", {"host", "cache_move"}), ("rejection", "static", {"host"})]
)
def test_the_parts_of_a_round_add_up(small, drafts, requests, rule, shape, idle, batch):
    """Every operator of a round is in one of its parts; a chain moves no keys. Each takes a second of the clock."""
    timed = build_decoder(small, drafts["eagle3"], rule, shape, batch)
    prompts, limits = (part[:5] for part in requests)
    operators = []
    with WatchedOperators(lambda operator, *_: operators.append(operator)):
        laps = PhaseTimer(synchronize=timed.target.device.synchronize, clock=lambda: len(operators))
        answers = timed.decode(prompts, row_ids=list(range(5)), max_new_tokens=limits, phase_timer=laps)
    assert laps.rounds == count_rounds(answers) > 0
    assert sum(laps.seconds.values()) == laps.wall_s
    assert {part for part, seconds in laps.seconds.items() if seconds == 0} == idle
    assert laps.seconds["verify"] > 0.1 * laps.wall_s


@pytest.mark.parametrize("least", LEAST)
def test_requests_that_come_while_others_are_decoded_are_answered_as_alone(small, drafts, requests, least):
    """Each answer is handed over as it ends, and may bring the next request."""
    prompts, limits = requests
    admitted = [
        Request(ids=ids, row_id=100 + i, max_new_tokens=limit)
        for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    busy = build_decoder(small, drafts["eagle3"], "coupled", "static", BATCH)
    waiting, later, reads, finished = admitted[: 2 * BATCH], admitted[2 * BATCH :], [], []

    def take(most):
        taken, waiting[:] = waiting[:most], waiting[most:]
        reads.extend([len(taken)] * bool(taken))
        return taken

    for request in busy.stream(take, min_free_rows=least):
        if not finished:
            assert reads == [BATCH]
        finished.append(request)
        waiting += [later.pop(0)] if later else []
    assert reads[1] >= least
    assert sum(reads) == len(finished) == len(set(finished)) == COUNT
    own = decode_alone(build_decoder(small, drafts["eagle3"], "coupled", "static", 1), requests)
    assert [(each.generation.ids, each.generation.accepted) for each in admitted] == own


def test_answers_of_uneven_length_take_a_third_of_the_rounds(small):
    """Count the rounds of docs/regeneration.md: 512 answers, 40 tokens in the mean, 32 at a time."""
    numbers = torch.Generator().manual_seed(0)
    drawn = torch.empty(512).exponential_(1 / 40, generator=numbers)
    limits = drawn.clamp(1, 200).long().tolist()
    pending = iter([Request(ids=[1, 2, 3], row_id=i, max_new_tokens=n) for i, n in enumerate(limits)])
    together = Decoder(small, sampling=SamplingConf(), slots=220, batch=32)
    finished = list(together.stream(lambda most: list(islice(pending, most)), min_free_rows=8))
    assert len(finished) == 512
    in_batches = sum(max(limits[first : first + 32]) - 1 for first in range(0, 512, 32))
    full = sum(limits) // 32
    rounds = count_rounds([request.generation for request in finished])
    assert (rounds, in_batches, full) == (821, 2485, 637)
