"""Conversations of five chat formats are asked turn by turn as serving would, and recorded as generated."""

import asyncio
import copy

import pytest

from data.answers.dialogue import CONTEXT_FULL, DIFFERENT_TOOL_CALL, UNEXPECTED_TOOL_CALL, Answer, Dialogue
from data.sources.prepared_rows import PreparedRow
from tests.support.data.chat import conf
from tests.support.data.families import ANSWER, CALLING, CASES, FAMILIES, QUESTION, RESULT, THANKS, TOOLS

OTHERS = "0 of the data."


class ScriptedBackend:
    """A backend that gives the answers of a script, turn by turn."""

    def __init__(self, tokenizer, script, room=4096):
        self.script = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in script]
        self.max_prompt_tokens, self.prompts = room, []

    async def generate_answer(self, ids, *, key):
        self.prompts.append(ids)
        return Answer(ids=self.script[len(self.prompts) - 1], finish_reason="stop")

    async def close(self):
        pass


def answer_dialogue(tokenizer, script, messages, tools=None, template=None, **asker):
    """Answer the dialogue; return it, its row and the prompts of its requests."""
    backend = ScriptedBackend(tokenizer, script, **asker)
    row = PreparedRow(id="0", source="", messages=messages, tools=tools, template=template or {})
    dialogue = Dialogue(row=row, backend=backend, tokenizer=tokenizer, conf=conf())
    return dialogue, asyncio.run(dialogue.answer_turns()), backend.prompts


def replace_answers(messages):
    """Return messages as data sets have them: with answers of another model, and without thoughts."""
    replaced = copy.deepcopy(messages)
    for message in replaced:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message["content"] = OTHERS
        message.pop("reasoning_content", None)
    return replaced


def select_keys(messages, keys):
    return [{key: message[key] for key in keys if key in message} for message in messages]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_each_turn_is_asked_behind_the_targets_own_answers(family, case):
    tokenizer, case = FAMILIES[family].tokenizer(family), FAMILIES[family].cases[case]
    dialogue, row, prompts = answer_dialogue(
        tokenizer, case.says, replace_answers(case.messages), case.tools, case.template
    )
    assert not dialogue.end_reason
    assert select_keys(row.messages, ("role", "content", "tool_calls")) == select_keys(
        case.messages, ("role", "content", "tool_calls")
    )
    thoughts = [m.get("reasoning_content", m.get("thinking", "")) for m in row.messages]
    assert thoughts == [m.get("reasoning_content", "") for m in case.messages]
    answers = [tokenizer.decode(document.ids[begin:end]) for document in row.documents for begin, end in document.spans]
    assert answers == case.says
    for turn, prompt in enumerate(prompts):
        holder = next(d for d in row.documents if d.ids[: len(prompt)] == prompt)
        assert [len(prompt), len(prompt) + len(tokenizer(case.says[turn])["input_ids"])] in (holder.spans)


def test_thoughts_of_the_data_do_not_reach_a_target_that_repeats_its_tool_call():
    family = FAMILIES["qwen3"]
    case = family.cases["tools"]
    messages = [QUESTION, CALLING | {"reasoning_content": "Of another model."}, RESULT, ANSWER]
    tokenizer = family.tokenizer("qwen3")
    _, row, prompts = answer_dialogue(tokenizer, case.says, messages, TOOLS, {"enable_thinking": False})
    assert len(prompts) == 2
    assert "another model" not in tokenizer.decode(prompts[1]) + str(row.messages)


def test_old_thoughts_are_not_shown_where_the_template_drops_them():
    family = FAMILIES["qwen3"]
    case = family.cases["thoughts"]
    _, row, prompts = answer_dialogue(family.tokenizer("qwen3"), case.says, replace_answers(case.messages))
    shown = family.tokenizer("qwen3").decode(prompts[1])
    assert "I look." not in shown
    assert ANSWER["content"] in shown
    assert [len(document.spans) for document in row.documents] == [1, 1]


def test_a_conversation_ends_where_the_target_departs_from_the_data():
    """It ends at a different call, at a call without a result in the data, and when the context is full."""
    family = FAMILIES["qwen3"]
    tokenizer = family.tokenizer("qwen3")
    call, reply = family.cases["tools"].says
    messages = [QUESTION, CALLING, RESULT, ANSWER]
    for text in (call.replace("Troms", "Os"), call.replace("weather", "news"), reply):
        dialogue, row, _ = answer_dialogue(tokenizer, [text], messages, TOOLS)
        assert (dialogue.end_reason, len(row.messages)) == (DIFFERENT_TOOL_CALL, 2)
    dialogue, row, _ = answer_dialogue(tokenizer, [call], [QUESTION, ANSWER, THANKS, ANSWER], TOOLS)
    assert (dialogue.end_reason, len(row.messages)) == (UNEXPECTED_TOOL_CALL, 2)
    dialogue, row, prompts = answer_dialogue(tokenizer, [reply, reply], [QUESTION, ANSWER, THANKS, ANSWER], room=74)
    assert (dialogue.end_reason, len(row.messages), len(prompts)) == (CONTEXT_FULL, 2, 1)


def test_a_result_without_a_call_that_the_target_could_repeat_ends_the_conversation():
    family = FAMILIES["qwen3"]
    says = family.cases["tools"].says
    texts = [QUESTION, {"role": "assistant", "content": "weather()"}, RESULT, ANSWER]
    dialogue, row, _ = answer_dialogue(family.tokenizer("qwen3"), says[1:], texts, TOOLS)
    assert (dialogue.end_reason, len(row.messages)) == (DIFFERENT_TOOL_CALL, 2)


def test_answers_in_a_row_are_asked_for_once():
    family = FAMILIES["llama-3.1"]
    says = family.cases["multi"].says
    data = [QUESTION, ANSWER, ANSWER, THANKS, ANSWER]
    dialogue, row, prompts = answer_dialogue(family.tokenizer("llama-3.1"), says, data)
    assert not dialogue.end_reason
    assert len(prompts) == 2
    assert [m["role"] for m in row.messages] == ["user", "assistant"] * 2


def test_of_answers_in_a_row_the_call_is_what_the_target_must_repeat():
    family = FAMILIES["qwen3"]
    call, reply = family.cases["tools"].says
    data = [QUESTION, {"role": "assistant", "content": "Let me look."}, CALLING, RESULT, ANSWER]
    dialogue, row, _ = answer_dialogue(family.tokenizer("qwen3"), [call, reply], data, TOOLS)
    assert (dialogue.end_reason, len(row.messages)) == ("", 4)
    dialogue, row, _ = answer_dialogue(family.tokenizer("qwen3"), [reply], data, TOOLS)
    assert (dialogue.end_reason, len(row.messages)) == (DIFFERENT_TOOL_CALL, 2)


def test_the_same_call_in_other_spaces_is_the_same_call():
    family = FAMILIES["qwen3"]
    call, reply = family.cases["tools"].says
    loose = "\n<tool_call>\n{ " + call.removeprefix("<tool_call>\n{")
    dialogue, row, _ = answer_dialogue(
        family.tokenizer("qwen3"), [loose, reply], [QUESTION, CALLING, RESULT, ANSWER], TOOLS
    )
    assert not dialogue.end_reason
    assert len(row.documents) == 2  # shown again as the template writes it


def test_a_last_question_is_answered_too():
    family = FAMILIES["llama-3.1"]
    says = family.cases["multi"].says
    _, row, prompts = answer_dialogue(family.tokenizer("llama-3.1"), says, [QUESTION, ANSWER, THANKS])
    assert len(prompts) == 2
    assert [m["role"] for m in row.messages] == ["user", "assistant"] * 2
