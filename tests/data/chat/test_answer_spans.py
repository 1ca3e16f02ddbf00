"""Masks are exact where templates and tokenizers are awkward, and wrong masks stop a run."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from data.chat.mask_check import EARLY_CHECK_DOCUMENTS, check_documents
from data.chat.template import ChatTemplate
from data.chat.tokenization import document_from_messages, documents_from_row
from data.config import DataConf, DataSource, TurnSelection
from data.sources.row_formats import parse_row
from data.sources.rows import Conversation, RowRejectedError, TokenizedDocument, document_from_spans
from models.io.errors import UserError
from tests.data.chat.test_tokenization import (
    CHAT,
    EXACT,
    HEAD,
    PLAIN,
    PROMPT,
    TAGGED,
    TAGGED_SHORT,
    build_chat_tokenizer,
    decode_answers,
)
from tests.support.data.families import AGAIN, ANSWER, CALLING, FAMILIES, MULTI, QUESTION, RESULT, SINGLE, TOOLS, TWICE

THOUGHT = "<think>\n\n</think>\n\n"
# Marks the header, an empty thought that serving sends in the prompt, and the line break behind.
WIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|start|>assistant\n"
    + "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    + "{{ m.content }}<|end|>\n{% endgeneration %}"
    + "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}"
    + "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TWO_MARKS = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}({{ m.reasoning }}){% endgeneration %} "
    "{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n{% else %}{{ m.content }}<|end|>\n"
    "{% endif %}{% endfor %}" + PROMPT
)
# Drops the system prompt once there is an answer, and the answer counts the messages.
COUNTING = (
    "{% if messages[0].role == 'system' and messages[-1].role == 'user' %}{{ messages[0].content }}"
    "{% endif %}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "<{{ m.content }}>{% else %}{{ m.content }}{{ messages | length }}{% endif %}{% endfor %}"
)
ONLY_ANSWERS = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"


def build_template(template: str, **arguments) -> ChatTemplate:
    return ChatTemplate(tokenizer=build_chat_tokenizer(template), arguments=arguments)


def read_documents(
    tokenizer, messages, turns=TurnSelection.each, **row
) -> tuple[list[TokenizedDocument], Counter[str]]:
    conf = DataConf(source=DataSource.jsonl, path="rows.jsonl", turns=turns)
    row = Conversation(messages=messages, **row)
    return documents_from_row(row, conf, tokenizer)


@pytest.mark.parametrize("last_only", [False, True])
def test_a_mark_reaches_from_the_prompt_to_the_end_of_the_turn(last_only):
    wide = build_template(WIDE if last_only else WIDE.replace("loop.last", "true"))
    document = document_from_messages(wide, CHAT, last_only=last_only)
    assert decode_answers(wide.tokenizer, document) == EXACT[1 if last_only else 0 :]


@pytest.mark.parametrize("eos", ["<|end|>", "</s>"])
def test_an_answer_that_ends_in_an_added_token_of_its_own_keeps_its_end_of_turn(eos):
    tokenizer = build_chat_tokenizer(TAGGED_SHORT)
    tokenizer.add_tokens(["</code>"])
    tokenizer.eos_token = eos
    for content in ("<code>1</code>", "<code>1</code>\n"):
        messages = [QUESTION, {"role": "assistant", "content": content}]
        document = document_from_messages(ChatTemplate(tokenizer=tokenizer), messages * 2)
        assert decode_answers(tokenizer, document) == [f"{content}<|end|>"] * 2


def test_marks_do_not_hide_that_a_template_rewrites_earlier_turns():
    with pytest.raises(UserError, match=r"^data.turns: .*message 2 changes .*data.turns=each"):
        document_from_messages(build_template(WIDE), CHAT)


@pytest.mark.parametrize("case", FAMILIES["harmony"].cases)
def test_marks_around_whole_turns_change_nothing(case):
    """The marks include the header, and thoughts that the template drops from earlier turns."""
    plain = FAMILIES["harmony"].tokenizer("harmony")
    marked = FAMILIES["harmony"].tokenizer("harmony")
    before, calls, final, results = re.split(
        r"(?=\n    {%- (?:el)?if message.role == '(?:assistant|tool)')", plain.chat_template
    )
    marked.chat_template = (
        before
        + "".join(part.replace("%}", "%}{%- generation -%}", 1) + "{%- endgeneration -%}" for part in (calls, final))
        + results
    )
    case = FAMILIES["harmony"].cases[case]
    for turns in TurnSelection:
        row = {"turns": turns, "tools": case.tools}
        if turns is TurnSelection.all and case.rewritten:
            continue
        assert read_documents(marked, case.messages, **row) == read_documents(plain, case.messages, **row)


def test_an_empty_thought_belongs_to_the_answer_where_thinking_is_enabled():
    wide = build_template(WIDE, enable_thinking=True)
    document = document_from_messages(wide, CHAT, last_only=True)
    assert decode_answers(wide.tokenizer, document) == [THOUGHT + EXACT[1]]


def test_a_turn_may_have_several_marks_and_thoughts_any_name():
    thoughtful = [message | {"thinking": "Hm."} for message in CHAT]
    tokenizer = build_chat_tokenizer(TWO_MARKS)
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), thoughtful, last_only=True)
    assert decode_answers(tokenizer, document) == ["(Hm.)", EXACT[1]]


@pytest.mark.parametrize("tagged", [False, True])
def test_an_end_of_text_token_of_the_template_is_not_learned(tagged):
    """Phi-3's template writes such a token, while the target ends its turn with another."""
    behind = PROMPT.replace("{% endif %}", "{% else %}</s>{% endif %}")
    tokenizer = build_chat_tokenizer((TAGGED if tagged else PLAIN).replace(PROMPT, behind))
    tokenizer.eos_token = "</s>"
    for last_only in (False, True):
        document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT, last_only=last_only)
        assert decode_answers(tokenizer, document) == EXACT[last_only:]


def test_a_mark_takes_an_end_of_turn_token_that_is_not_eos():
    tokenizer = build_chat_tokenizer(TWO_MARKS)
    tokenizer.eos_token = "</s>"
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT)
    assert decode_answers(tokenizer, document)[1::2] == EXACT


def test_a_prompt_is_tokenised_alone_whatever_the_answer_begins_with():
    tokenizer = build_chat_tokenizer(PLAIN)
    for content in ["\n\nHello", " Hello", "\n think", "\u00e9\U0001f976"]:
        messages = [CHAT[1], {"role": "assistant", "content": content}]
        document = document_from_messages(ChatTemplate(tokenizer=tokenizer), messages)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)
        assert document.ids[: len(prompt["input_ids"])] == prompt["input_ids"]
        assert decode_answers(tokenizer, document) == [f"{content}<|end|>"]


def test_an_end_of_turn_token_that_swallows_the_line_break_is_learned():
    tokenizer = build_chat_tokenizer(PLAIN)
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT)
    assert decode_answers(tokenizer, document) == EXACT


def test_an_answer_that_the_template_changes_behind_its_own_history_is_left_out():
    tokenizer = build_chat_tokenizer(COUNTING.replace("{{ messages | length }}", "."))
    [document], skipped = read_documents(tokenizer, CHAT[:3])
    assert decode_answers(tokenizer, document) == ["I am well.."]
    assert not skipped
    documents, skipped = read_documents(build_chat_tokenizer(COUNTING), CHAT[:3])
    assert not documents
    assert skipped == {"the chat template rewrites what it wrote before an answer": 1}


def test_a_line_break_behind_a_mark_is_not_the_end_of_a_turn():
    tokenizer = build_chat_tokenizer(TWO_MARKS.replace("<|end|>", "{{ '\\n' }}"))
    tokenizer.add_tokens(["\n"])
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT)
    assert decode_answers(tokenizer, document)[1::2] == ["I am well.", "  Why?\n"]


def test_a_token_that_reaches_into_the_next_turn_is_not_learned():
    tokenizer = build_chat_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    turns = [("user", "I am well"), ("assistant", "It is col"), ("user", "d?"), ("assistant", "I")]
    messages = [{"role": role, "content": content} for role, content in turns]
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), messages)
    assert len(tokenizer(" cold")["input_ids"]) == 1
    assert decode_answers(tokenizer, document) == ["It is", "I"]


@pytest.mark.parametrize("space", ["", " "])
def test_a_tokenizer_that_puts_a_space_before_a_text_gets_the_whole_text(space):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["<s>", "</s>", "\u2581", *"Helo Itiscdhrwamn,?()x."]
    vocabulary = {character: index for index, character in enumerate(dict.fromkeys(characters))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(characters[:2])
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}({{ m.content }}){% else %}"
        + space
        + "{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    answer = {"role": "assistant", "content": "It is cold."}
    [document], _ = read_documents(tokenizer, [QUESTION, answer])
    learned = [token for token, flag in zip(document.ids, document.answer, strict=True) if flag]
    expected = f"{space}It is cold.</s>".replace(" ", "\u2581")
    assert "".join(tokenizer.convert_ids_to_tokens(learned)) == expected


def test_messages_that_a_template_does_not_write_or_refuses_are_counted():
    gemma, llama, harmony = (FAMILIES[name].tokenizer(name) for name in ("gemma-3", "llama-3.1", "harmony"))
    documents, skipped = read_documents(gemma, [QUESTION, CALLING, RESULT, ANSWER])
    assert not documents  # no call is written, and no result
    unwritten, refused = skipped
    assert unwritten == "a tool call that the chat template does not write"
    assert refused.startswith("rejected by the chat template: Conversation roles must alternate")
    assert read_documents(llama, TWICE[:2], tools=TOOLS)[1].total() == 1
    assert read_documents(harmony, TWICE[:2], tools=TOOLS)[1] == {unwritten: 1}  # one of two
    no_json = build_chat_tokenizer("{{ messages[0].nothing | tojson }}" + PLAIN)
    assert read_documents(no_json, CHAT)[1].total() == 2


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("llama-3.1", {"content": "", "reasoning_content": "Only a thought."}),
        ("qwen3", {"content": "<think>\n\n</think>\n\n"}),
    ],
)
def test_an_answer_that_the_template_leaves_empty_is_not_learned_as_an_end(family, answer):
    tokenizer = FAMILIES[family].tokenizer(family)
    [document], skipped = read_documents(tokenizer, [*SINGLE, QUESTION, {"role": "assistant", **answer}])
    assert decode_answers(tokenizer, document)[0].startswith(ANSWER["content"])
    assert skipped == {"an answer of which the chat template writes nothing": 1}


def test_arguments_of_the_row_win_over_those_of_the_data():
    tokenizer = FAMILIES["qwen3"].tokenizer("qwen3")
    conf = DataConf(source=DataSource.jsonl, path="x", template={"enable_thinking": True})
    row = Conversation(messages=SINGLE)
    [thinking], _ = documents_from_row(row, conf, tokenizer)
    unthinking = replace(row, template={"enable_thinking": False})
    [plain], _ = documents_from_row(unthinking, conf, tokenizer)
    assert decode_answers(tokenizer, thinking) == [THOUGHT + decode_answers(tokenizer, plain)[0]]


def test_a_conversation_without_a_prompt_stops_the_run():
    with pytest.raises(UserError, match="must hold a prompt too, got answer tokens only"):
        document_from_messages(build_template(ONLY_ANSWERS), CHAT[1:3])
    with pytest.raises(UserError, match="must hold a prompt too"):
        document_from_spans([1, 2, 3], [(0, 2), (2, 3)])


def test_recorded_spans_are_the_answers_unchanged():
    document = document_from_spans([5, 6, 7, 8, 9], [(1, 3), (4, 5)])
    assert document.answer == [False, True, True, False, True]
    with pytest.raises(RowRejectedError, match="do not lie in the ids"):
        document_from_spans([5, 6], [(1, 3)])


GOOD = TokenizedDocument(ids=[1, 2], answer=[False, True])
SILENT = TokenizedDocument(ids=[1, 2], answer=[False, False], category="code")
ALL_ANSWER = TokenizedDocument(ids=[1, 2], answer=[True, True], category="code")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SILENT, r"of category 'code' must hold answer tokens, got none in 3; look at them"),
        (ALL_ANSWER, r"of category 'code' must hold prompts too, got only answers in 3;"),
    ],
)
def test_a_category_whose_masks_are_all_wrong_stops_the_run(bad, message):
    with pytest.raises(UserError, match=message):
        list(check_documents([GOOD, bad, GOOD, bad, bad], Counter()))
    good = replace(GOOD, category="code")
    assert list(check_documents([bad, good], Counter())) == [bad, good]
    with pytest.raises(UserError, match=f"{EARLY_CHECK_DOCUMENTS:,}"):  # before the data ends
        list(check_documents([bad] * EARLY_CHECK_DOCUMENTS + [good], Counter()))


def test_no_document_at_all_is_refused_with_the_reasons():
    with pytest.raises(UserError, match=r"got none \(too odd: 2\)"):
        list(check_documents([], Counter({"too odd": 2})))


def test_an_answer_that_was_cut_in_its_thoughts_first_line_break_is_counted():
    """It has neither content nor reasoning, once Qwen3's thought is read from its text."""
    tokenizer, conf = FAMILIES["qwen3"].tokenizer("qwen3"), DataConf(source=DataSource.jsonl, path="rows.jsonl")
    message = {"role": "assistant", "content": "<think>\n"}
    row = parse_row({"messages": [QUESTION, message], "finish_reason": "length"})
    expected = Counter({"an answer that was cut before its first word": 1})
    assert documents_from_row(row, conf, tokenizer) == ([], expected)


def test_consecutive_answers_each_have_the_turns_before_them_as_prompt():
    tokenizer = FAMILIES["qwen3"].tokenizer("qwen3")
    documents, skipped = read_documents(tokenizer, [*MULTI, AGAIN])
    assert not skipped
    assert [decode_answers(tokenizer, document)[0] for document in documents][1:] == [
        f"{AGAIN['content']}<|im_end|>"
    ] * 2
