"""Which conversations are held back from the documents of a run, and what is left to learn."""

import logging
from dataclasses import replace

import pytest

from data.eval_prompts.held_out_files import rows_from_documents
from data.eval_prompts.hold_out import split_held_out
from data.packing.documents import Documents
from data.sources.rows import TokenizedDocument, document_from_pair

TEXT = list(range(20, 50))


def held(documents: list[TokenizedDocument], *, selection: int = 0, final: int = 0, **lengths):
    given = {"row_length": 36} | lengths
    return split_held_out(Documents.from_documents(documents), selection=selection, final=final, **given)


def conversation(number: int, *, first: int | None = None, turns: int = 1, category: str = ""):
    """The documents of a conversation, one a turn, each with the history before it."""
    prompt, found = [first or 100 + number, 7], []
    for turn in range(turns):
        document = document_from_pair(prompt, [8, turn])
        found.append(replace(document, conversation=number, category=category))
        prompt = [*document.ids, 9]
    return found


def test_prompts_are_held_back_from_all_over_the_data():
    """What comes before an answer, and the beginning of a text; never what is learned too."""
    plain = [TokenizedDocument(ids=[n, *TEXT], answer=[place > 0 for place in range(31)]) for n in range(4)]
    pairs = [document_from_pair([n, 2, 3], [4, 5]) for n in range(4)]
    documents = [one for both in zip(pairs, plain, strict=True) for one in both]
    found = held(documents, selection=3)
    assert found.training.tolist() == [1, 2, 4, 5, 6]
    rows = rows_from_documents(Documents.from_documents(documents), found.selection, "here")
    assert [row["ids"] for row in rows] == [[0, 2, 3], [1, *TEXT][:16], [3, *TEXT][:16]]
    assert len(held(documents, selection=100).selection) == 4


def test_no_turn_of_a_held_back_conversation_is_learned():
    documents = [one for number in range(40) for one in conversation(number, turns=3)]
    found = held(documents, selection=4, final=8)
    learned = {documents[number].conversation for number in found.training.tolist()}
    judged, choosing = (
        {documents[number].conversation for number in numbers} for numbers in (found.final, found.selection)
    )
    assert (len(judged), len(choosing), len(learned)) == (8, 4, 28)
    assert not judged & choosing
    assert not learned & (judged | choosing)
    assert {number % 3 for number in found.final} == {0, 1, 2}  # first, second and third turns


def test_conversations_of_one_prompt_are_held_back_together():
    """A question that is asked again and again would otherwise be learned and judged by."""
    documents = [one for number in range(40) for one in conversation(number, first=None if number % 2 else 5, turns=2)]
    found = held(documents, final=20)
    prompts = {tuple(documents[number].ids[:2]) for number in found.final}
    learned = {tuple(documents[number].ids[:2]) for number in found.training.tolist()}
    assert (5, 7) in prompts
    assert not prompts & learned


def test_questions_are_held_back_under_every_system_prompt():
    """A date or a name in the system prompt makes other tokens of the same question."""
    documents = [
        replace(
            document_from_pair([system, 100 + question, 7], [8, 9]),
            conversation=2 * question + system,
            first_question=1 + question,
        )
        for question in range(100)
        for system in (0, 1)
    ]
    found = held(documents, final=32, selection=8)
    judged, learned = (
        {documents[number].first_question for number in numbers}
        for numbers in (found.final + found.selection, found.training.tolist())
    )
    assert (len(judged), len(learned)) == (40, 60)
    assert not judged & learned


def test_every_category_of_the_data_is_judged():
    common = [one for number in range(200) for one in conversation(number, category="chat")]
    rare = [one for number in range(200, 203) for one in conversation(number, category="code")]
    documents = [*common[:150], *rare, *common[150:]]
    found = held(documents, selection=5, final=6)
    for numbers in (found.final, found.selection):
        assert {documents[number].category for number in numbers} == {"chat", "code"}


def test_what_cannot_be_learned_or_judged_is_not_held_back():
    silent, late = document_from_pair([1, 2, 3], []), document_from_pair([1] * 40, [2])
    documents = [silent, late, document_from_pair([7], [8]), document_from_pair([9], [8])]
    found = held(documents, selection=3)
    assert (found.training.tolist(), found.selection) == ([0, 1, 3], [2])
    long, short = (document_from_pair([5] * 20, [6]), [document_from_pair([n, n], [6]) for n in range(4)])
    found = held([long, *short], final=3, max_prompt_tokens=10)
    assert 0 in found.training.tolist()
    assert (len(found.final), found.num_too_long) == (2, 1)


@pytest.mark.parametrize(("groups", "final", "selection"), [(2, 1, 0), (4, 1, 1), (400, 64, 32)])
def test_at_most_half_of_the_conversations_are_held_back(groups, final, selection):
    documents = [one for number in range(groups) for one in conversation(number)]
    found = held(documents, selection=32, final=64)
    assert len(found.final) == final
    assert len(found.training) == groups - final - selection


def test_what_begins_like_many_others_is_learned_whole(caplog):
    """Plain texts with one header are one group, and holding it back would leave little."""
    alike = [TokenizedDocument(ids=[*TEXT, n], answer=[place > 0 for place in range(31)]) for n in range(65)]
    other = [document_from_pair([100 + n, 7], [8, 9]) for n in range(4)]
    with caplog.at_level(logging.INFO):
        found = held([*alike, *other], selection=1, final=1)
    assert set(range(65)) <= set(found.training.tolist())
    assert (len(found.final), len(found.selection), found.num_too_long) == (1, 1, 0)
    assert "65 documents that begin like many others are not held back" in caplog.text
    found = held(alike, selection=1, final=1)  # with evaluation.prompts such data can be learned
    assert (len(found.training), found.selection, found.final) == (65, [0], [])


def test_a_single_document_is_kept_to_learn_from(caplog):
    found = held([document_from_pair([1, 2, 3], [4, 5])], selection=3, final=3, row_length=16)
    assert (found.training.tolist(), found.final, found.selection) == ([0], [], [0])
    assert "too little to hold prompts back" in caplog.text
