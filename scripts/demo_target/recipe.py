"""Define the demo's target: its training text, its tokenizer and its architecture.

`python -m scripts.demo_target.train` trains it; a second, wide shape is for studies.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from data.demo.corpus import (
    LIBRARY,
    TEST_FOLDERS,
    is_held_out,
    library_texts,
    list_python_files,
    modules_by_name,
    read_source,
)
from data.demo.prompts import structured_texts

VOCAB_SIZE = 4096
NUM_LAYERS = 48
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' + message['content'] + '<|endoftext|>' }}"
    "{% else %}"
    "{{ '<|user|>\\n' + message['content'] + '\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SOURCE_SHARES = {"code": 0.47, "docs": 0.2, "tests": 0.28, "structured": 0.05}  # of the tokens
NUM_STRUCTURED_TEXTS = 20_000
NUM_CONVERSATIONS = 3_000


def texts_by_source(seed: int) -> dict[str, list[str]]:
    """Return all training texts by source; tests are left out if Python ships none (Debian)."""
    code, docs = (list(library_texts(kind, held_out=False)) for kind in ("code", "docs"))
    texts = {
        "code": code,
        "docs": docs + build_conversations(code + docs, NUM_CONVERSATIONS, seed=seed),
        "tests": read_test_texts(),
        "structured": structured_texts(NUM_STRUCTURED_TEXTS, seed=seed),
    }
    return {source: source_texts for source, source_texts in texts.items() if source_texts}


def read_test_texts(library: Path = LIBRARY) -> list[str]:
    """Read the library's tests, if it has any, except those named after a held-out module."""
    held_out = {f"test_{Path(name).stem}" for name in modules_by_name(library) if is_held_out(name)}
    paths = [
        path
        for name, path in list_python_files(library)
        if not TEST_FOLDERS.isdisjoint(name.split("/")) and path.stem not in held_out
    ]
    return [text for path in paths if (text := read_source(path))]


def build_conversations(texts: list[str], count: int, *, seed: int) -> list[str]:
    """Build conversations for the chat template: a text's lines, then the lines that follow."""
    rng = random.Random(seed)
    chats = []
    for text in rng.sample(texts, k=min(count, len(texts))):
        lines = text.splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 8))
        cut = start + rng.randint(1, 6)
        question, answer = "".join(lines[start:cut]), "".join(lines[cut : cut + 24])
        if question.strip() and answer.strip():
            chats.append(f"<|user|>\n{question.rstrip()}\n<|assistant|>\n{answer.rstrip()}")
    return chats


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single digits, so that numbers can be counted."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The architecture of a target, and its depths by share of the training time."""

    config: type[PretrainedConfig]
    num_layers: int
    settings: dict[str, Any]
    growth: tuple[tuple[float, int], ...]

    def layers_at(self, used_share: float) -> int:
        """Return the number of layers at this share of the time."""
        return [layers for share, layers in self.growth if used_share >= share][-1]


SHAPES = {
    # The demo's target is deep and narrow, so that one layer is a small share of its cost.
    "deep": TargetShape(
        config=Qwen3Config,
        num_layers=NUM_LAYERS,
        settings={
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 256,
            "tie_word_embeddings": True,
        },
        growth=((0.0, NUM_LAYERS // 4), (0.2, NUM_LAYERS // 2), (0.45, NUM_LAYERS)),
    ),
    # A second target for studies: shallow and wide, of 9.6 million parameters.
    "wide": TargetShape(
        config=LlamaConfig,
        num_layers=6,
        settings={
            "hidden_size": 320,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "intermediate_size": 784,
            "tie_word_embeddings": False,
        },
        growth=((0.0, 6),),
    ),
}


def build_model(shape: TargetShape = SHAPES["deep"], num_layers: int | None = None) -> Any:
    """Build the untrained model, by default of the shape's full depth."""
    model = AutoModelForCausalLM.from_config(
        shape.config(
            **shape.settings,
            num_hidden_layers=num_layers or shape.num_layers,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            initializer_range=0.02,
        ),
        dtype=torch.float32,
    )
    with torch.no_grad():  # GPT-2's initialization keeps the scale of the residual stream at depth
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                param.div_(math.sqrt(2 * shape.num_layers))
    return model


def deepen_model(model: Any, shape: TargetShape, num_layers: int) -> Any:
    """Build a deeper model from repeated copies of the model's layers, in their order.

    Training a shallow model first reaches most of its quality in a fraction of the time (stacking,
    Du et al., arXiv 2405.15319).
    """
    deeper, old, old_layers = build_model(shape, num_layers), model.state_dict(), model.config.num_hidden_layers
    layer = re.compile(r"(?<=layers\.)\d+")
    origins = {name: layer.sub(lambda number: str(int(number[0]) % old_layers), name) for name in deeper.state_dict()}
    deeper.load_state_dict({name: old[origin] for name, origin in origins.items()})
    return deeper.to(model.device)


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray:
    """Encode the texts as one stream of uint16 ids, with <|endoftext|> after each text."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    ids = [np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(ids)
