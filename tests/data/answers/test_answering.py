"""Every row is answered once, turn by turn, whatever the batch and however often the command is repeated."""

import json

import pytest

from data.answers.answering import AnswersReport, answer_rows
from data.answers.dialogue import ANSWER_CUT, PROMPT_TOO_LONG, Answer, UnansweredError, derive_answer_seed
from data.sources.prepared_rows import PreparedRow
from infer.engine.answer_backend import TargetAnswerBackend
from infer.engine.answers import generate_answers
from models.io.errors import UserError
from tests.support.data.chat import ASSISTANT, asked, chat_target, conf

ROWS = 9


@pytest.fixture(scope="module")
def target():
    return chat_target()


def answer_all(target, journal, rows, backend=None, **changes):
    """Answer the rows; return them and the report."""
    answers_conf, report = conf(**changes), AnswersReport()
    backend = backend or TargetAnswerBackend(target, answers_conf)
    answers = answer_rows(rows, backend, target.tokenizer, answers_conf, journal, report=report, total=len(rows))
    return list(answers), report


@pytest.fixture(scope="module")
def batched(target, tmp_path_factory):
    """Return rows that were answered eight at a time, and the report."""
    return answer_all(target, tmp_path_factory.mktemp("answers") / "journal", asked(ROWS))


def test_answers_do_not_depend_on_the_batch(target, batched, tmp_path):
    alone, _ = answer_all(target, tmp_path / "1", asked(ROWS), batch=1)
    assert alone == batched[0]
    other, _ = answer_all(target, tmp_path / "seed", asked(2), seed=1)
    assert [row.documents for row in other] != [row.documents for row in alone[:2]]


@pytest.mark.parametrize(("device", "sizes"), [("cpu", 2), ("xla", 1)])
def test_short_prompts_are_batched_apart_from_long_ones_unless_that_compiles_for_an_hour(
    target, device, sizes, tmp_path, monkeypatch
):
    """Nine short prompts and three long ones are answered, four at a time."""
    texts = ["3 4 5", "3 4 5", "3 4 5", "3 " * 60] * 3
    rows = [PreparedRow(id=str(i), source="", text=text) for i, text in enumerate(texts)]
    forward, passes = target.forward_hidden, []

    def record(input_ids, **inputs):
        passes.append((*input_ids.shape, inputs["mask"].shape[-1]))
        return forward(input_ids, **inputs)

    monkeypatch.setattr(target, "forward_hidden", record)
    monkeypatch.setattr(target.device, "name", device)
    answers, _ = answer_all(target, tmp_path / "j", rows, batch=4)
    assert len({slots for _, length, slots in passes if length == 1}) == sizes
    own = sum(len(row.documents[0].ids) - row.answers[0].tokens for row in answers)
    padded = sum(count * length for count, length, _ in passes if length > 1)
    assert padded == own


def test_every_answer_has_a_seed_of_its_own():
    keys = {derive_answer_seed(seed, row, turn) for seed in (0, 1) for row in ("1", "11") for turn in (0, 1)}
    assert len(keys) == 8
    assert max(keys) < 2**31
    assert derive_answer_seed(0, "1", 0) == 898252347


def test_each_turn_is_the_targets_own_behind_its_own_history(target, batched):
    """The recorded answer is the target's own when it gets exactly that prompt."""
    rows, report = batched
    assert [row.id for row in rows] == [row.id for row in asked(ROWS)]
    multi_turn = 0
    for row in rows:
        (document,) = row.documents  # this template rewrites nothing
        multi_turn += len(document.spans) > 1
        for drawn, (begin, end) in zip(row.answers, document.spans, strict=True):
            ((_, own),) = generate_answers(
                target,
                [document.ids[:begin]],
                max_new_tokens=16,
                sampling=conf().sampling,
                row_ids=[derive_answer_seed(0, row.id, drawn.turn)],
            )
            assert document.ids[begin:end] == own
            assert (drawn.finish_reason == "stop") == (own[-1] == 0)
        answers = [m["content"] for m in row.messages if m["role"] == "assistant"]
        assert "1 2 3" not in answers
        assert document.ids.count(ASSISTANT) >= len(answers) == len(row.answers)
        rendered = target.tokenizer.apply_chat_template(row.messages, return_dict=True)["input_ids"]
        assert rendered[: len(document.ids)] == document.ids
    assert multi_turn > 2
    assert report.ended[ANSWER_CUT] == sum(
        row.answers[-1].finish_reason == "length" and len(row.messages) < len(asked_row.messages)
        for row, asked_row in zip(rows, asked(ROWS), strict=True)
    )
    assert report.rows == ROWS
    assert report.tokens == sum(answer.tokens for row in rows for answer in row.answers)


def test_prompts_are_continued_and_rows_that_cannot_be_answered_are_counted(target, tmp_path):
    rows = [
        PreparedRow(id="text", source="source", text="3 4 5"),
        PreparedRow(id="prompt", source="source", messages=[{"role": "user", "content": "3 4 5"}]),
        PreparedRow(id="long", source="source", text="7 " * 241),
        PreparedRow(id="fits", source="source", text="7 " * 240),
        PreparedRow(id="role", source="source", messages=[{"role": "poet", "content": "3"}]),
        PreparedRow(id="empty", source="source", text=""),
    ]
    answers, report = answer_all(target, tmp_path / "j", rows)
    assert [row.id for row in answers] == ["text", "prompt", "fits"]
    assert answers[0].documents[0].ids[:3] == [3, 4, 5]
    assert answers[0].documents[0].spans[0][0] == 3
    assert [message["role"] for message in answers[1].messages] == ["user", "assistant"]
    assert report.dropped == {
        "source": {PROMPT_TOO_LONG: 1, "rejected by the chat template: no such role": 1, "without a token": 1}
    }
    assert report.rows + report.dropped["source"].total() == len(rows)


class FailingBackend:
    """A backend that answers with one token and fails for some prompts."""

    max_prompt_tokens = 240

    def __init__(self, failing=()):
        self.failing, self.requests = set(failing), []

    async def generate_answer(self, ids, *, key):
        self.requests.append(key)
        if key in self.failing:
            raise UnansweredError("status 500", "out of order")
        return Answer(ids=[5, 0], finish_reason="stop")

    async def close(self):
        pass


def test_failed_rows_are_listed_and_they_alone_are_asked_again(target, tmp_path):
    rows = [PreparedRow(id=str(i), source="source", text="3 4") for i in range(20)]
    bad = FailingBackend(failing=[derive_answer_seed(0, "3", 0), derive_answer_seed(0, "7", 0)])
    with pytest.raises(UserError, match=r"got 2 that failed for good \(2 status 500\), 18 done"):
        answer_all(target, tmp_path / "j.jsonl", rows, bad)
    listed = (tmp_path / "j.failed.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in listed] == ["3", "7"]
    answers, report = answer_all(target, tmp_path / "j.jsonl", rows, bad, skip_failed=True)
    assert len(answers) == 18
    assert report.dropped == {"source": {"failed: status 500": 2}}
    good = FailingBackend()
    answers, report = answer_all(target, tmp_path / "j.jsonl", rows, good)
    assert len(good.requests) == 2
    assert [row.id for row in answers] == [row.id for row in rows]
    assert report.rows == 20
    assert not (tmp_path / "j.failed.jsonl").exists()


def test_an_endpoint_that_always_fails_is_not_asked_for_every_row(target, tmp_path):
    rows = [PreparedRow(id=str(i), source="source", text="3 4") for i in range(500)]
    dead = FailingBackend(failing=[derive_answer_seed(0, row.id, 0) for row in rows])
    with pytest.raises(UserError, match=r"failed for good.*; rerun for these$"):
        answer_all(target, tmp_path / "j", rows, dead, skip_failed=True, batch=2)
    assert len(dead.requests) < 50


def test_the_rows_of_truncated_and_damaged_lines_alone_are_asked_again(target, tmp_path):
    journal = tmp_path / "j"
    rows = [PreparedRow(id=str(i), source="source", text="3 4") for i in range(6)]
    complete, _ = answer_all(target, journal, rows, FailingBackend())
    text = journal.read_bytes()
    first, second, *others = text.splitlines(keepends=True)
    truncated = [text[:-1], text[:-40], first[:-1], b""]
    for damaged in (*truncated, b"".join([first, b"\0" * 9, second[9:], *others])):
        journal.write_bytes(damaged)
        again = FailingBackend()
        answers, _ = answer_all(target, journal, rows, again)
        assert answers == complete
        sound = set(damaged.splitlines(keepends=True)) & {first, second, *others}
        assert len(again.requests) == 6 - len(sound)
        assert set(text.splitlines()) <= set(journal.read_bytes().splitlines())
