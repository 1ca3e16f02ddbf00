"""Loss masks hold exactly the tokens that the target would have produced."""

import json
from itertools import groupby

import pytest
from transformers import PreTrainedTokenizerFast

from data.chat.template import ChatTemplate
from data.chat.tokenization import document_from_messages, document_from_text, documents_from_row
from data.config import DataConf, DataSource, TurnSelection
from data.sources.row_formats import parse_row
from data.sources.rows import Conversation, RowRejectedError
from models.io.errors import UserError
from tests.support.models.tiny import byte_tokenizer

MARKERS = ["<|start|>", "<|end|>", "<s>", "</s>"]

HEAD = "{% for m in messages %}<|start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = HEAD + "{{ m.content }}<|end|>\n{% endfor %}" + PROMPT
TAGGED = (
    HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    + "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    + PROMPT
)
TAGGED_SHORT = TAGGED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
# Writes an empty thought before the last answer, and removes it once the conversation goes on.
THINKING = (
    HEAD
    + "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    + "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
NO_PROMPT = HEAD + "{{ m.content }}<|end|>\n{% endfor %}"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "I am well."},
    {"role": "user", "content": "Say <|start|>assistant\nno<|end|>"},
    {"role": "assistant", "content": "  Why?\n"},
]


def build_chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    return byte_tokenizer(MARKERS, template=template, eos_token="<|end|>")


def decode_answers(tokenizer, document) -> list[str]:
    """Decode each run of answer tokens."""
    assert len(document.ids) == len(document.answer)
    pairs = groupby(zip(document.ids, document.answer, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for answer, run in pairs if answer]


def test_no_text_of_a_conversation_is_rendered_twice(monkeypatch):
    tokenizer, rendered = build_chat_tokenizer(THINKING), []
    honest = tokenizer.apply_chat_template

    def record_and_render(messages, **arguments):
        rendered.append(json.dumps([messages, arguments]))
        return honest(messages, **arguments)

    monkeypatch.setattr(tokenizer, "apply_chat_template", record_and_render)
    conf = DataConf(source=DataSource.jsonl, path="rows.jsonl", turns=TurnSelection.auto)
    documents, skipped = documents_from_row(Conversation(messages=CHAT), conf, tokenizer)
    assert (len(documents), len(skipped)) == (2, 0)  # refused in one document, then read turn by turn
    assert len(rendered) == len(set(rendered))


EXACT = ["I am well.<|end|>", "  Why?\n<|end|>"]


@pytest.mark.parametrize("template", [PLAIN, TAGGED, TAGGED_SHORT], ids=["plain", "tag", "short"])
def test_answers_are_the_assistant_turns_with_their_end(template):
    tokenizer = build_chat_tokenizer(template)
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT)
    assert decode_answers(tokenizer, document) == EXACT
    last = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT, last_only=True)
    assert (last.ids, decode_answers(tokenizer, last)) == (document.ids, EXACT[1:])
    rendered = tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert document.ids == rendered[: len(document.ids)]
    assert not tokenizer.decode(rendered[len(document.ids) :]).strip()


def test_an_answer_that_ended_at_its_limit_is_learned_without_the_end_that_the_template_writes():
    tokenizer, conf = build_chat_tokenizer(PLAIN), DataConf(source=DataSource.jsonl, path="rows.jsonl")
    raw = {"messages": CHAT[:-1], "answer": "Because it", "finish_reason": "length"}
    (whole,), _ = documents_from_row(parse_row({**raw, "finish_reason": "stop"}), conf, tokenizer)
    (cut,), _ = documents_from_row(parse_row(raw), conf, tokenizer)
    assert cut.ids == whole.ids[:-1]
    assert decode_answers(tokenizer, whole) == ["I am well.<|end|>", "Because it<|end|>"]
    assert decode_answers(tokenizer, cut) == ["I am well.<|end|>", "Because it"]


def test_marks_agree_with_the_tokenizers_own_mask():
    tokenizer = build_chat_tokenizer(TAGGED)
    expected = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    answer = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT).answer
    assert answer == [bool(mark) for mark in expected["assistant_masks"]][: len(answer)]


def test_a_template_that_changes_the_prompt_itself_is_refused():
    tokenizer = build_chat_tokenizer("{{ messages | length }}" + PLAIN)
    with pytest.raises(RowRejectedError, match="rewrites what it wrote before an answer"):
        document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT, last_only=True)


def test_a_template_without_a_header_needs_no_generation_prompt():
    tokenizer = build_chat_tokenizer(INST)
    document = document_from_messages(ChatTemplate(tokenizer=tokenizer), CHAT[1:3])
    assert decode_answers(tokenizer, document) == [" I am well.</s>"]


def test_a_header_is_never_taken_for_the_answer():
    with pytest.raises(UserError, match="must support add_generation_prompt"):
        document_from_messages(ChatTemplate(tokenizer=build_chat_tokenizer(NO_PROMPT)), CHAT)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match=r"without one; use plain text \(data.format=text\)"):
        document_from_messages(ChatTemplate(tokenizer=build_chat_tokenizer(None)), CHAT)


def test_every_token_of_a_text_but_the_first_counts():
    tokenizer = build_chat_tokenizer(None)
    document = document_from_text(tokenizer, "Hello there")
    assert tokenizer.decode(document.ids) == "Hello there"
    assert document.answer == [False] + [True] * (len(document.ids) - 1)


def test_a_tokenizer_without_offsets_is_refused():
    from transformers.tokenization_python import PythonBackend

    slow = PythonBackend.__new__(PythonBackend)
    slow.chat_template = PLAIN
    with pytest.raises(UserError, match=r"reports character offsets, got PythonBackend; give ids"):
        document_from_messages(ChatTemplate(tokenizer=slow), CHAT)
