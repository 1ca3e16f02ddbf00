"""On-policy rows: the draft rewrites answers at renewals, the same ones however many processes share a step."""

import pytest
import torch

from conf.entry import compose
from data.config import OnPolicyConf
from data.packing.sampler import RowOrder
from models.io.errors import UserError
from tests.support.runs.toy_run import toy_rows, toy_target
from train.config.run import TrainConf
from train.rows.on_policy import OnPolicy, first_answer_spans


def build_on_policy(target, *, share: float = 0.5, rank: int = 0, world: int = 1) -> OnPolicy:
    rows = toy_rows()
    return OnPolicy(
        conf=OnPolicyConf(share=share, interval=4, temperature=1.0),
        rows=rows,
        order=RowOrder(seed=1, num_rows=len(rows), rows_per_step=8),
        language_model=target,
        eos_ids=target.eos_ids,
        rank=rank,
        world_size=world,
    )


def test_own_answers_replace_the_answers_of_the_rows():
    target = toy_target()
    policy = build_on_policy(target)
    policy.renew(0, end=8)
    assert policy.written
    changed = 0
    for number, row in policy.written.items():
        before = policy.rows.batch([number])
        for begin, end in first_answer_spans(before):
            document = before.document_ids[0, begin]
            inside = (before.document_ids[0] == document) & (row.document_ids[0] == document)
            prompt = inside & ~before.answer_mask[0]
            assert torch.equal(row.input_ids[0, prompt], before.input_ids[0, prompt])
            assert row.answer_mask[0, begin : begin + 1].all()
            changed += int((row.input_ids[0, begin:end] != before.input_ids[0, begin:end]).sum())
        assert not row.answer_mask[0, row.document_ids[0] < 0].any()
    assert changed > 0


def test_own_answers_are_those_that_the_draft_writes():
    """At temperature 0, each answer is the draft's own greedy continuation of its prompt."""
    target = toy_target()
    policy = build_on_policy(target)
    policy.conf.temperature = 0.0
    policy.renew(0, end=8)
    number, row = next(iter(policy.written.items()))
    for begin, end in first_answer_spans(policy.rows.batch([number])):
        start = int((row.document_ids[0] == row.document_ids[0, begin]).int().argmax())
        prompt = row.input_ids[0, start:begin][None]
        expected = target.model.generate(prompt, max_new_tokens=end - begin, do_sample=False)
        assert row.input_ids[0, begin:end].tolist() == expected[0, begin - start :].tolist()


def test_a_renewal_writes_the_rows_of_the_steps_until_the_next_one():
    """Renewals are at multiples of 4 steps; a run that continues at step 6 or ends at 7 renews for fewer steps."""
    policy = build_on_policy(toy_target())
    for steps, end in ((range(4, 8), 20), (range(6, 8), 20), (range(4, 7), 7)):
        policy.renew(steps.start, end=end)
        visits = [visit for step in steps for visit in policy.list_visits(step)]
        assert set(policy.written) == {number for number, is_drafted in visits if is_drafted}


def test_an_answer_ends_at_the_end_token_of_the_target():
    """A base model as draft has another, past which it would go on."""
    policy = build_on_policy(toy_target(), share=1.0)
    policy.renew(0, end=1)
    number, row = next(iter(policy.written.items()))
    begin, end = first_answer_spans(row)[0]
    policy.eos_ids = [int(row.input_ids[0, (begin + end) // 2])]
    policy.renew(0, end=1)
    begin, end = first_answer_spans(policy.written[number])[0]
    answer = policy.written[number].input_ids[0, begin:end].tolist()
    assert answer.index(policy.eos_ids[0]) == len(answer) - 1


def test_each_renewal_writes_other_answers_and_a_repeated_one_the_same():
    policies = [build_on_policy(toy_target(), share=1.0) for _ in range(3)]
    for policy, step in zip(policies, (0, 0, 4), strict=True):
        policy.renew(step, end=8)
    first, again, later = ({n: row.input_ids for n, row in policy.written.items()} for policy in policies)
    assert first.keys() == again.keys()
    assert all(torch.equal(ids, again[number]) for number, ids in first.items())
    shared = first.keys() & later.keys()
    assert shared
    assert any(not torch.equal(first[number], later[number]) for number in shared)


def test_a_row_is_written_the_same_by_any_process():
    """Its noise is that of its place in the data, not of its place among the rows that a process writes."""
    single = build_on_policy(toy_target())
    single.renew(0, end=8)
    for rank in (0, 1):
        part = build_on_policy(toy_target(), rank=rank, world=2)
        part.renew(0, end=8)
        assert part.written
        for number, row in part.written.items():
            assert torch.equal(row.input_ids, single.written[number].input_ids)
            assert torch.equal(row.answer_mask, single.written[number].answer_mask)


def test_the_share_of_own_answers_is_the_configured_share():
    policy = build_on_policy(toy_target(), share=0.25)
    chosen = [own for step in range(400) for _, own in policy.list_visits(step)]
    assert abs(sum(chosen) / len(chosen) - 0.25) < 0.03
    none = build_on_policy(toy_target(), share=0.0)
    assert not any(own for step in range(50) for _, own in none.list_visits(step))


def test_processes_together_choose_the_rows_of_a_single_process():
    single = build_on_policy(toy_target()).list_visits(3)
    parts = [build_on_policy(toy_target(), rank=rank, world=2).list_visits(3) for rank in (0, 1)]
    assert single == [visit for pair in zip(*parts, strict=True) for visit in pair]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft=demo"], "data.on_policy.share: needs a draft that is a language model"),
        (["draft=demo-lm", "loss=ce"], "data.on_policy.share: must be 0 for loss=ce"),
        (["draft=demo-lm", "interval.save=40"], "interval.save: must be a multiple of"),
    ],
)
def test_on_policy_rows_that_make_no_sense_are_refused(overrides, message):
    conf = compose("train", TrainConf, [*overrides, "data.on_policy.share=0.5"])
    with pytest.raises(UserError) as refused:
        conf.check_settings()
    assert str(refused.value).startswith(message)
