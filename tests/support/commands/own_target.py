"""Save a small target of a known chat family, and rows in the format of a public data set."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.data import write_lines
from tests.support.data.families import FAMILIES

TOPICS = ("rain", "bread", "a bicycle", "the moon", "a list", "gravity", "tea", "Oslo")


def save_target(folder: Path, *, family: str = "qwen3", weights: bool = True, **shape: float) -> Path:
    """Save a thin Qwen3 with the tokenizer and the chat template of the family.

    Without `weights` every weight is NaN, so that a command that loads the target is refused for them.
    """
    tokenizer = FAMILIES[family].tokenizer(family)
    own = {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        **own | shape,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    if not weights:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
    model.save_pretrained(folder)
    return folder


def save_conversations(file: Path, *, count: int, turns: int = 3, words: int = 8) -> Path:
    """Write rows in UltraChat's format: a prompt, its id and messages with up to `turns` answers."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(1 + number % turns):
            topic = TOPICS[(number + turn) % len(TOPICS)]
            question = f"Question {number}.{turn}: tell me about {topic}."
            answer = " ".join(f"{topic} is {topic} {number + n}" for n in range(words))
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"{answer}."}]
        prompt = messages[0]["content"]
        rows.append({"prompt": prompt, "prompt_id": f"{number:08x}", "messages": messages})
    return write_lines(file, rows)
