"""Build a tiny target with a chat template of numbers whose answers end."""

from pathlib import Path

import torch

from data.prepare_config import AnswersConf
from data.sources.prepared_rows import PreparedRow
from models.targets.target import Target
from tests.support.models.tiny import VOCAB, tiny_target

USER, ASSISTANT = 58, 59
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    f"{ASSISTANT} {{{{ m['content'] }}}} end "
    "{% elif m['role'] == 'user' %}"
    f"{USER} {{{{ m['content'] }}}} "
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT} {{% endif %}}"
)


def chat_target() -> Target:
    """Build `tiny_target` with a chat template and an end token that is drawn as often as other tokens."""
    target = tiny_target(seed=0)
    head = target.model.lm_head.weight
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head[0] = 3 * head[1:].std() * torch.randn(head.shape[1], generator=numbers)
    target.tokenizer.chat_template = TEMPLATE
    return target


def save(target: Target, folder: Path) -> Path:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def asked(count: int) -> list[PreparedRow]:
    """Build conversations of up to three user turns, each followed by an answer that the data holds."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(1 + number % 3):
            first = 1 + (7 * number + 13 * turn) % (VOCAB - 10)
            words = " ".join(str(first + i) for i in range(3 + (number + turn) % 4))
            messages += [{"role": "user", "content": words}, {"role": "assistant", "content": "1 2 3"}]
        rows.append(PreparedRow(id=f"row-{number}", source="generated", messages=messages))
    return rows


def conf(**changes) -> AnswersConf:
    return AnswersConf(**{"max_new_tokens": 16, "temperature": 0.7, "batch": 8} | changes)
