"""Five chat formats answered turn by turn: asked as serving would ask, recorded as generated."""

import asyncio
import copy

import pytest

from data.answers.dialogue import CONTEXT_FULL, DIFFERENT_TOOL_CALL, UNEXPECTED_TOOL_CALL, Answer, Dialogue
from data.sources.prepared_rows import PreparedRow
from tests.support.data.chat import conf
from tests.support.data.families import ANSWER, CALLING, CASES, FAMILIES, QUESTION, RESULT, THANKS, TOOLS

OTHERS = "0 of the data."


class Saying:
    """A target that says exactly this, turn by turn."""

    def __init__(self, tokenizer, says, room=4096):
        self.says = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in says]
        self.max_prompt_tokens, self.prompts = room, []

    async def generate_answer(self, ids, *, key):
        self.prompts.append(ids)
        return Answer(ids=self.says[len(self.prompts) - 1], finish_reason="stop")

    async def close(self):
        pass


def answered(tokenizer, says, messages, tools=None, template=None, **asker):
    """The dialogue, its row as answered, and the prompts that were asked."""
    saying = Saying(tokenizer, says, **asker)
    row = PreparedRow(id="0", source="", messages=messages, tools=tools, template=template or {})
    dialogue = Dialogue(row=row, backend=saying, tokenizer=tokenizer, conf=conf())
    return dialogue, asyncio.run(dialogue.answer_turns()), saying.prompts


def in_other_words(messages):
    """As data sets have it: the answers are somebody else's, and without thoughts."""
    told = copy.deepcopy(messages)
    for message in told:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message["content"] = OTHERS
        message.pop("reasoning_content", None)
    return told


def heard(messages, keys):
    return [{key: message[key] for key in keys if key in message} for message in messages]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_each_turn_is_asked_behind_what_the_target_said(family, case):
    tokenizer, case = FAMILIES[family].tokenizer(family), FAMILIES[family].cases[case]
    dialogue, row, prompts = answered(tokenizer, case.says, in_other_words(case.messages), case.tools, case.template)
    assert not dialogue.end_reason
    assert heard(row.messages, ("role", "content", "tool_calls")) == heard(
        case.messages, ("role", "content", "tool_calls")
    )
    thoughts = [m.get("reasoning_content", m.get("thinking", "")) for m in row.messages]
    assert thoughts == [m.get("reasoning_content", "") for m in case.messages]
    spoken = [tokenizer.decode(document.ids[begin:end]) for document in row.documents for begin, end in document.spans]
    assert spoken == case.says
    for turn, prompt in enumerate(prompts):
        holder = next(d for d in row.documents if d.ids[: len(prompt)] == prompt)
        assert [len(prompt), len(prompt) + len(tokenizer(case.says[turn])["input_ids"])] in (holder.spans)


def test_old_thoughts_are_not_shown_where_the_template_drops_them():
    family = FAMILIES["qwen3"]
    case = family.cases["thoughts"]
    _, row, prompts = answered(family.tokenizer("qwen3"), case.says, in_other_words(case.messages))
    shown = family.tokenizer("qwen3").decode(prompts[1])
    assert "I look." not in shown
    assert ANSWER["content"] in shown
    assert [len(document.spans) for document in row.documents] == [1, 1]


def test_a_conversation_ends_where_the_target_leaves_it():
    """Another call, a call that the data has no result for, and a full context."""
    family = FAMILIES["qwen3"]
    tokenizer = family.tokenizer("qwen3")
    call, said = family.cases["tools"].says
    messages = [QUESTION, CALLING, RESULT, ANSWER]
    for text in (call.replace("Troms", "Os"), call.replace("weather", "news"), said):
        dialogue, row, _ = answered(tokenizer, [text], messages, TOOLS)
        assert (dialogue.end_reason, len(row.messages)) == (DIFFERENT_TOOL_CALL, 2)
    dialogue, row, _ = answered(tokenizer, [call], [QUESTION, ANSWER, THANKS, ANSWER], TOOLS)
    assert (dialogue.end_reason, len(row.messages)) == (UNEXPECTED_TOOL_CALL, 2)
    dialogue, row, prompts = answered(tokenizer, [said, said], [QUESTION, ANSWER, THANKS, ANSWER], room=74)
    assert (dialogue.end_reason, len(row.messages), len(prompts)) == (CONTEXT_FULL, 2, 1)


def test_the_same_call_in_other_spaces_is_the_same_call():
    family = FAMILIES["qwen3"]
    call, said = family.cases["tools"].says
    loose = "\n<tool_call>\n{ " + call.removeprefix("<tool_call>\n{")
    dialogue, row, _ = answered(family.tokenizer("qwen3"), [loose, said], [QUESTION, CALLING, RESULT, ANSWER], TOOLS)
    assert not dialogue.end_reason
    assert len(row.documents) == 2  # shown again as the template writes it


def test_a_last_question_is_answered_too():
    family = FAMILIES["llama-3.1"]
    says = family.cases["multi"].says
    _, row, prompts = answered(family.tokenizer("llama-3.1"), says, [QUESTION, ANSWER, THANKS])
    assert len(prompts) == 2
    assert [m["role"] for m in row.messages] == ["user", "assistant"] * 2
