"""scripts/prose.py tells private words from plain ones, and fragments from sentences."""

import ast

import pytest

from scripts.prose import is_fragment, list_private_words

PRIVATE = [
    "found = 1",
    "def read(rows_kept): pass",
    "def done(): pass",
    "self.wanted = 1",
    "import os as place",
    "# The text is taken whole.",
    "'''As an engine said.'''",
    "x = 'the count of rows kept'",
    "def test_a_row_of_one(): pass",
]
PLAIN = [
    "one_row = kept_rows = 1",
    "print(found)",
    "# One process reads one of two files, at least one row, or the last one.",
    "# The tensor is changed in place, and a checkpoint is made of it.",
    "# Files are not found in a folder that was never made.",
    "# A whole sequence has whole numbers.",
    "path = 'outputs/done'",
    "def test_a_row_is_kept_by_one_process(): pass",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_a_private_word_counts_where_a_name_is_bound_and_in_prose(text):
    assert len(list(list_private_words(text, ast.parse(text)))) == 1


@pytest.mark.parametrize("text", PLAIN)
def test_a_word_in_its_plain_meaning_does_not_count(text):
    assert list(list_private_words(text, ast.parse(text))) == []


@pytest.mark.parametrize(
    "docstring",
    [
        "What a round costs.",
        "Rows that share a batch.",
        "Of each kind of state, trained a little.",
        "The same with figures that are known.",
        "Twelve of 6 to 40 random tokens: some are long.",
    ],
)
def test_a_phrase_without_a_main_clause_is_a_fragment(docstring):
    assert is_fragment(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "Return what a round costs.",
        "Rows that share a batch are decoded as if alone.",
        "A file that is cut fails: it is named.",
        "Rows get other neighbors.",
        "With two rows that differ, each row keeps its own path.",
    ],
)
def test_an_imperative_or_declarative_sentence_is_no_fragment(docstring):
    assert not is_fragment(docstring)
