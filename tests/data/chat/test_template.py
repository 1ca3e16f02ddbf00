"""Seven published chat formats: supervised tokens are what the target says, and nothing else."""

from itertools import groupby

import pytest

from data.chat.tokenization import documents_from_row
from data.config import DataConf, DataSource, TurnSelection
from data.sources.rows import Conversation, TokenizedDocument
from models.io.errors import UserError
from tests.support.data.families import CASES, FAMILIES, Case


@pytest.fixture(scope="module")
def tokenizers():
    return {name: family.tokenizer(name) for name, family in FAMILIES.items()}


def documents(tokenizer, case: Case, turns: TurnSelection) -> list[TokenizedDocument]:
    """Those of the case, none of them left out."""
    conf = DataConf(source=DataSource.jsonl, path="rows.jsonl", turns=turns)
    row = Conversation(messages=case.messages, tools=case.tools, template=case.template)
    found, skipped = documents_from_row(row, conf, tokenizer)
    assert not skipped
    return found


def runs(tokenizer, document: TokenizedDocument) -> list[tuple[bool, str]]:
    """Whether answer or not, and the text of each run of tokens."""
    pairs = groupby(zip(document.ids, document.answer, strict=True), key=lambda pair: pair[1])
    return [(answer, tokenizer.decode([token for token, _ in run])) for answer, run in pairs]


def served(tokenizer, case: Case, turn: int) -> list[int]:
    """The ids that serving sends for a turn, thinking or not as the answer has it."""
    arguments = dict(case.template)
    message = case.messages[turn]
    if "reasoning_content" not in message:
        arguments = {"enable_thinking": False} | arguments
    messages = [dict(m) | {"thinking": m.get("reasoning_content")} for m in case.messages[:turn]]
    return tokenizer.apply_chat_template(messages, tools=case.tools, add_generation_prompt=True, **arguments)[
        "input_ids"
    ]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_each_turn_is_its_prompt_and_what_the_target_says(tokenizers, family, case):
    tokenizer, case = tokenizers[family], FAMILIES[family].cases[case]
    turns = [turn for turn, m in enumerate(case.messages) if m["role"] == "assistant"]
    found = documents(tokenizer, case, TurnSelection.each)
    assert len(found) == len(turns)
    for document, turn, says in zip(found, turns, case.says, strict=True):
        assert runs(tokenizer, document)[1:] == [(True, says)]
        prompt = served(tokenizer, case, turn)
        assert document.ids[: len(prompt)] == prompt
        assert document.answer == [False] * len(prompt) + [True] * (len(document.ids) - len(prompt))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_all_turns_in_one_document_or_a_refusal(tokenizers, family, case):
    tokenizer, case = tokenizers[family], FAMILIES[family].cases[case]
    if case.rewritten:
        with pytest.raises(UserError, match=r"^data.turns: .*set data.turns=each") as error:
            documents(tokenizer, case, TurnSelection.all)
        assert "\n" not in str(error.value)
    else:
        [document] = documents(tokenizer, case, TurnSelection.all)
        assert [text for answer, text in runs(tokenizer, document) if answer] == case.says
        [last] = documents(tokenizer, case, TurnSelection.last)
        assert tokenizer.decode(document.ids) == tokenizer.decode(last.ids)
