"""In seven published chat formats the supervised tokens are exactly those that the target emits."""

from itertools import groupby

import pytest

from data.chat.tokenization import documents_from_row
from data.config import DataConf, DataSource, TurnSelection
from data.sources.rows import Conversation, TokenizedDocument
from models.io.errors import UserError
from tests.support.data.families import CASES, FAMILIES, ConversationCase


@pytest.fixture(scope="module")
def tokenizers():
    return {name: family.tokenizer(name) for name, family in FAMILIES.items()}


def read_case(tokenizer, case: ConversationCase, turns: TurnSelection) -> list[TokenizedDocument]:
    """Return the documents of the case, none of them left out."""
    conf = DataConf(source=DataSource.jsonl, path="rows.jsonl", turns=turns)
    row = Conversation(messages=case.messages, tools=case.tools, template=case.template)
    documents, skipped = documents_from_row(row, conf, tokenizer)
    assert not skipped
    return documents


def split_runs(tokenizer, document: TokenizedDocument) -> list[tuple[bool, str]]:
    """Return of each run of tokens whether it is answer, and its text."""
    pairs = groupby(zip(document.ids, document.answer, strict=True), key=lambda pair: pair[1])
    return [(answer, tokenizer.decode([token for token, _ in run])) for answer, run in pairs]


def render_prompt(tokenizer, case: ConversationCase, turn: int) -> list[int]:
    """Return the ids that serving sends for a turn, with thinking enabled if the answer has thoughts."""
    arguments = dict(case.template)
    message = case.messages[turn]
    if "reasoning_content" not in message:
        arguments = {"enable_thinking": False} | arguments
    messages = [dict(m) | {"thinking": m.get("reasoning_content")} for m in case.messages[:turn]]
    return tokenizer.apply_chat_template(messages, tools=case.tools, add_generation_prompt=True, **arguments)[
        "input_ids"
    ]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_each_turn_is_its_prompt_and_the_answer_of_the_target(tokenizers, family, case):
    tokenizer, case = tokenizers[family], FAMILIES[family].cases[case]
    turns = [turn for turn, m in enumerate(case.messages) if m["role"] == "assistant"]
    documents = read_case(tokenizer, case, TurnSelection.each)
    assert len(documents) == len(turns)
    for document, turn, says in zip(documents, turns, case.says, strict=True):
        assert split_runs(tokenizer, document)[1:] == [(True, says)]
        prompt = render_prompt(tokenizer, case, turn)
        assert document.ids[: len(prompt)] == prompt
        assert document.answer == [False] * len(prompt) + [True] * (len(document.ids) - len(prompt))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_all_turns_are_in_one_document_or_the_template_is_refused(tokenizers, family, case):
    tokenizer, case = tokenizers[family], FAMILIES[family].cases[case]
    if case.rewritten:
        with pytest.raises(UserError, match=r"^data.turns: .*set data.turns=each") as error:
            read_case(tokenizer, case, TurnSelection.all)
        assert "\n" not in str(error.value)
    else:
        [document] = read_case(tokenizer, case, TurnSelection.all)
        assert [text for answer, text in split_runs(tokenizer, document) if answer] == case.says
        [last] = read_case(tokenizer, case, TurnSelection.last)
        assert tokenizer.decode(document.ids) == tokenizer.decode(last.ids)
        assert [text for answer, text in split_runs(tokenizer, last) if answer] == case.says[-1:]
