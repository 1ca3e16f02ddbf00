"""What the demo's target is made of: its text, its tokenizer and its shape.

`scripts/train_demo_target.py` trains it; the result lies in `data/demo/target`.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.demo.corpus import training_texts
from data.demo.structured import structured_texts

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
MIXTURE = {"code": 0.47, "docs": 0.2, "tests": 0.28, "structured": 0.05}  # shares of the tokens
STRUCTURED_TEXTS = 20_000
CONVERSATIONS = 3_000


def texts_by_source(seed: int) -> dict[str, list[str]]:
    """All text to train on. A Python without its tests (Debian's) trains without them."""
    code, docs = list(training_texts("code")), list(training_texts("docs"))
    texts = {
        "code": code,
        "docs": docs + conversations(code + docs, CONVERSATIONS, seed=seed),
        "tests": list(training_texts("tests")),
        "structured": structured_texts(STRUCTURED_TEXTS, seed=seed),
    }
    return {source: part for source, part in texts.items() if part}


def conversations(texts: list[str], count: int, *, seed: int) -> list[str]:
    """Some texts as a user's first lines and an assistant's next ones, for the chat template."""
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
    """Byte-level BPE; digits stay single, so that numbers can be counted."""
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


def build_model(num_layers: int = NUM_LAYERS) -> Qwen3ForCausalLM:
    """Deep and narrow, so that one layer costs little of the whole."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            initializer_range=0.02,
        )
    )
    with torch.no_grad():  # GPT-2's rule: the residual stream keeps its size with depth
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                param.div_(math.sqrt(2 * NUM_LAYERS))
    return model


def deepen(model: Qwen3ForCausalLM, num_layers: int) -> Qwen3ForCausalLM:
    """A deeper model that starts as copies of the shallow one's layers, in their order.

    A shallow model learns most of what it can in a fraction of the time (stacking, Du et al.,
    arXiv 2405.15319).
    """
    deeper: Any = build_model(num_layers)
    old, new = model.state_dict(), {}
    count = model.config.num_hidden_layers
    for name in deeper.state_dict():
        parts = name.split(".")
        if "layers" in parts:
            place = parts.index("layers") + 1
            parts[place] = str(int(parts[place]) % count)
        new[name] = old[".".join(parts)]
    deeper.load_state_dict(new)
    return deeper.to(model.device)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray:
    """One stream of ids, each text ended by <|endoftext|>."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    ids = [np.array([*text.ids, tokenizer.eos_token_id], dtype=np.uint16) for text in encoded]
    return np.concatenate(ids)
