"""The demo measures on text that nothing was trained on, the same wherever Python is the same."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from data.demo import corpus
from data.demo.prompts import CATEGORIES, held_out_prompts, training_prompts
from scripts.demo_target.recipe import build_conversations, build_model, build_tokenizer, encode_texts, read_test_texts


def test_a_documented_definition_is_one_text():
    source = 'class A:\n    def run(self, x=1):\n        """Run."""\n\ndef bare():\n    pass\n'
    assert list(corpus.extract_docstrings(source)) == ["A.run(self, x=1)\n\nRun.\n"]


def test_held_out_files_are_never_trained_on():
    held_out = set(corpus.library_texts("code", held_out=True))
    trained_on = set(corpus.library_texts("code", held_out=False)) | set(read_test_texts())
    assert len(held_out) >= 16
    assert not held_out & trained_on


def test_a_file_is_held_out_by_its_name_alone():
    assert corpus.is_held_out("posixpath.py")
    assert not corpus.is_held_out("json/decoder.py")


def test_held_out_prompts_have_four_categories_of_sixteen():
    prompts = held_out_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 16)
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 64
    assert all(40 <= len(prompt.text) <= 160 for prompt in prompts)


def test_held_out_prompts_occur_nowhere_in_the_training_text():
    trained_on = "\0".join(
        (*corpus.library_texts("code", held_out=False), *corpus.library_texts("docs", held_out=False))
    )
    assert not [prompt.id for prompt in held_out_prompts() if prompt.text in trained_on]


def test_training_prompts_are_balanced_and_disjoint_from_held_out_ones():
    prompts = training_prompts(200, seed=0)
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 50)
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 200
    assert not {prompt.text for prompt in prompts} & {prompt.text for prompt in held_out_prompts()}


def test_prompts_are_the_same_in_every_process():
    show = "from data.demo.prompts import *; print(held_out_prompts(), training_prompts(40, seed=3))"
    child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert child.stdout == f"{held_out_prompts()} {training_prompts(40, seed=3)}\n"
    assert training_prompts(40, seed=3) != training_prompts(40, seed=4)


def test_the_corpus_needs_no_tests_of_the_library(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text('"""Decode."""\n')
    (tmp_path / "posixpath.py").write_text("def join(a, b):\n    return a + b\n")
    monkeypatch.setattr(corpus, "LIBRARY", tmp_path)
    uncached = corpus.library_texts.__wrapped__
    assert uncached("code", held_out=False) == ('"""Decode."""\n',)
    assert uncached("code", held_out=True) == ("def join(a, b):\n    return a + b\n",)
    assert read_test_texts(tmp_path) == []


def test_no_test_named_after_a_held_out_module_is_trained_on(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "posixpath.py").write_text("held_out = 1\n")
    (tmp_path / "test" / "test_posixpath.py").write_text("seen = 1\n")
    (tmp_path / "test" / "test_json.py").write_text("seen = 2\n")
    assert read_test_texts(tmp_path) == ["seen = 2\n"]


def test_the_shipped_target_is_small_and_fits_its_recipe_and_prompts():
    target = Path("data/demo/target")
    assert sum(file.stat().st_size for file in target.iterdir()) <= 12e6
    tokenizer = AutoTokenizer.from_pretrained(target)
    lengths = [len(tokenizer.encode(prompt.text)) for prompt in held_out_prompts()]
    assert 20 <= min(lengths) <= max(lengths) <= 60
    shape = ["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "vocab_size"]
    shipped, recipe = AutoConfig.from_pretrained(target), build_model().config
    assert [getattr(shipped, key) for key in shape] == [getattr(recipe, key) for key in shape]


def test_the_tokenizer_keeps_digits_single_and_writes_conversations():
    tokenizer = build_tokenizer(["def count(items):\n    return len(items)\n"] * 9)
    assert len(tokenizer.encode("2048")) == 4
    assert tokenizer.decode(tokenizer.encode("d\u00e9f\t x")) == "d\u00e9f\t x"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat == "<|user|>\na\n<|assistant|>\nb<|endoftext|>"
    assert encode_texts(tokenizer, ["a", "b"]).tolist().count(tokenizer.eos_token_id) == 2


def test_a_conversation_is_cut_from_one_text():
    text = "".join(f"line {i}\n" for i in range(40))
    chats = build_conversations([text], 1, seed=0)
    question, answer = chats[0].removeprefix("<|user|>\n").split("\n<|assistant|>\n")
    assert f"{question}\n{answer}" in text
