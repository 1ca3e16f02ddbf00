"""Conversations are held back from the documents of a run as a unit, and enough is left to learn."""

import logging
from dataclasses import replace

import pytest

from data.eval_prompts.held_out_files import rows_from_documents
from data.eval_prompts.hold_out import split_held_out
from data.packing.documents import Documents
from data.sources.rows import TokenizedDocument, document_from_pair

TEXT = list(range(20, 50))


def hold_out(documents: list[TokenizedDocument], *, selection: int = 0, final: int = 0, **lengths):
    lengths = {"row_length": 36} | lengths
    return split_held_out(Documents.from_documents(documents), selection=selection, final=final, **lengths)


def build_conversation(number: int, *, first: int | None = None, turns: int = 1, category: str = ""):
    """Return a document for each turn of a conversation, with the history before it."""
    prompt, documents = [first or 100 + number, 7], []
    for turn in range(turns):
        document = document_from_pair(prompt, [8, turn])
        documents.append(replace(document, conversation=number, category=category))
        prompt = [*document.ids, 9]
    return documents


def test_prompts_are_held_back_from_all_over_the_data():
    """They are the tokens before an answer, or the beginning of a text, and are not learned too."""
    plain = [TokenizedDocument(ids=[n, *TEXT], answer=[index > 0 for index in range(31)]) for n in range(4)]
    pairs = [document_from_pair([n, 2, 3], [4, 5]) for n in range(4)]
    documents = [document for both in zip(pairs, plain, strict=True) for document in both]
    split = hold_out(documents, selection=3)
    assert split.training.tolist() == [1, 2, 4, 5, 6]
    rows = rows_from_documents(Documents.from_documents(documents), split.selection, "here")
    assert [row["ids"] for row in rows] == [[0, 2, 3], [1, *TEXT][:16], [3, *TEXT][:16]]
    assert len(hold_out(documents, selection=100).selection) == 4


def test_no_turn_of_a_held_back_conversation_is_learned():
    documents = [document for number in range(40) for document in build_conversation(number, turns=3)]
    split = hold_out(documents, selection=4, final=8)
    learned = {documents[number].conversation for number in split.training.tolist()}
    evaluated, selected = (
        {documents[number].conversation for number in numbers} for numbers in (split.final, split.selection)
    )
    assert (len(evaluated), len(selected), len(learned)) == (8, 4, 28)
    assert not evaluated & selected
    assert not learned & (evaluated | selected)
    assert {number % 3 for number in split.final} == {0, 1, 2}  # first, second and third turns


def test_conversations_of_one_prompt_are_held_back_together():
    """A repeated question would otherwise be both learned and evaluated on."""
    documents = [
        document
        for number in range(40)
        for document in build_conversation(number, first=None if number % 2 else 5, turns=2)
    ]
    split = hold_out(documents, final=20)
    prompts = {tuple(documents[number].ids[:2]) for number in split.final}
    learned = {tuple(documents[number].ids[:2]) for number in split.training.tolist()}
    assert (5, 7) in prompts
    assert not prompts & learned


def test_questions_are_held_back_under_every_system_prompt():
    """A date or a name in the system prompt changes the tokens of the same question."""
    documents = [
        replace(
            document_from_pair([system, 100 + question, 7], [8, 9]),
            conversation=2 * question + system,
            first_question=1 + question,
        )
        for question in range(100)
        for system in (0, 1)
    ]
    split = hold_out(documents, final=32, selection=8)
    evaluated, learned = (
        {documents[number].first_question for number in numbers}
        for numbers in (split.final + split.selection, split.training.tolist())
    )
    assert (len(evaluated), len(learned)) == (40, 60)
    assert not evaluated & learned


def test_every_category_of_the_data_is_held_out():
    common = [document for number in range(200) for document in build_conversation(number, category="chat")]
    rare = [document for number in range(200, 203) for document in build_conversation(number, category="code")]
    documents = [*common[:150], *rare, *common[150:]]
    split = hold_out(documents, selection=5, final=6)
    for numbers in (split.final, split.selection):
        assert {documents[number].category for number in numbers} == {"chat", "code"}


def test_documents_without_answers_and_long_prompts_are_not_held_back():
    silent, late = document_from_pair([1, 2, 3], []), document_from_pair([1] * 40, [2])
    documents = [silent, late, document_from_pair([7], [8]), document_from_pair([9], [8])]
    split = hold_out(documents, selection=3)
    assert (split.training.tolist(), split.selection) == ([0, 1, 3], [2])
    long, short = (document_from_pair([5] * 20, [6]), [document_from_pair([n, n], [6]) for n in range(4)])
    split = hold_out([long, *short], final=3, max_prompt_tokens=10)
    assert 0 in split.training.tolist()
    assert (len(split.final), split.num_too_long) == (2, 1)


@pytest.mark.parametrize(("groups", "final", "selection"), [(2, 1, 0), (4, 1, 1), (400, 64, 32)])
def test_at_most_half_of_the_conversations_are_held_back(groups, final, selection):
    documents = [document for number in range(groups) for document in build_conversation(number)]
    split = hold_out(documents, selection=32, final=64)
    assert len(split.final) == final
    assert len(split.training) == groups - final - selection


def test_documents_that_begin_like_many_others_are_all_learned(caplog):
    """Plain texts with the same header are one group, and holding it back would leave little."""
    alike = [TokenizedDocument(ids=[*TEXT, n], answer=[index > 0 for index in range(31)]) for n in range(65)]
    other = [document_from_pair([100 + n, 7], [8, 9]) for n in range(4)]
    with caplog.at_level(logging.INFO):
        split = hold_out([*alike, *other], selection=1, final=1)
    assert set(range(65)) <= set(split.training.tolist())
    assert (len(split.final), len(split.selection), split.num_too_long) == (1, 1, 0)
    assert "65 documents that begin like many others are not held back" in caplog.text
    split = hold_out(alike, selection=1, final=1)  # with evaluation.prompts such data can be learned
    assert (len(split.training), split.selection, split.final) == (65, [0], [])


def test_a_single_document_is_not_held_back(caplog):
    split = hold_out([document_from_pair([1, 2, 3], [4, 5])], selection=3, final=3, row_length=16)
    assert (split.training.tolist(), split.final, split.selection) == ([0], [], [0])
    assert "too little to hold prompts back" in caplog.text
