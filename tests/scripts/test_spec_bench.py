"""Spec-Bench's questions are chosen by its six groups."""

from collections import Counter

import pytest

from scripts.spec_bench import MT_BENCH, choose_questions

QUESTIONS = [
    {"question_id": f"{category}-{number}", "category": category, "turns": ["?"]}
    for category, count in [*dict.fromkeys(sorted(MT_BENCH), 10).items(), ("qa", 80), ("rag", 80)]
    for number in range(count)
]


def test_each_group_gives_as_many_questions_and_each_category_of_mt_bench_its_share():
    chosen = choose_questions(QUESTIONS, 24)
    assert Counter(question["category"] for question in chosen) == dict.fromkeys(("mt_bench", "qa", "rag"), 24)
    ids = [question["question_id"] for question in chosen]
    assert len(set(ids)) == len(ids)
    shares = Counter(name.rpartition("-")[0] for name in ids)
    assert {shares[category] for category in MT_BENCH} == {3}


def test_more_than_a_group_has_are_refused():
    with pytest.raises(SystemExit, match="must be at most the 80 of mt_bench, got 81"):
        choose_questions(QUESTIONS, 81)
