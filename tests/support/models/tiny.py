"""Build a target in code, and train a draft on it in seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.batch import Batch
from models.device.cpu import CpuDevice
from models.device.device import Device
from models.drafts.eagle3 import Eagle3Draft
from models.drafts.loss import compute_loss
from models.drafts.options import Eagle3Conf
from models.drafts.registry import build_draft
from models.losses.config import LossConf, LossName
from models.targets.config import TargetConf
from models.targets.loading import freeze_model, load_target
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind

CPU = CpuDevice(name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=False)
VOCAB = 61
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # before a word, as SentencePiece writes it
LAYERS = [1, 3, 5]
SENTENCES = [
    "Hello there, how are you?",
    "I am well, thank you.\n\nIt is cold.",
    "user\n assistant\n\n system\n think\n\n",
]


def tiny_tokenizer(words: int = VOCAB) -> PreTrainedTokenizerFast:
    """Build a tokenizer that writes token k as the number k; `end`, id 0, ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"end": 0} | {str(i): i for i in range(1, words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="end"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end", pad_token="end")


@torch.no_grad()
def add_noise(model: nn.Module, noise: float) -> None:
    """Add noise to every weight, in proportion to the deviation of its tensor."""
    numbers = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter += noise * parameter.std(correction=0) * torch.randn(parameter.shape, generator=numbers)


def byte_tokenizer(
    markers: list[str], *, template: str | None, bos_token: str | None = None, eos_token: str
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on a few sentences: every text survives a round trip, and offsets are real."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=markers,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token=bos_token, eos_token=eos_token
    )


def byte_fallback_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer of words with a blank before, and of bytes for all other text, as that of Llama 2."""
    from tokenizers import Tokenizer, decoders, models

    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(BLANK + word for word in words)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = (decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence([*steps])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def byte_fallback_ids(tokenizer: PreTrainedTokenizerFast, *pieces: str | bytes) -> list[int]:
    """Return the ids of words and of single bytes."""
    tokens = [[f"<0x{byte:02X}>" for byte in p] if isinstance(p, bytes) else [BLANK + p] for p in pieces]
    return [tokenizer.convert_tokens_to_ids(token) for group in tokens for token in group]


def tiny_config(family: Any = Qwen3Config, **changes) -> Any:
    """Configure a model of six layers, whose token 0 ends a text and pads rows."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.15,
    }
    return family(**config | changes)


def tiny_target(
    *, seed: int, device: Device = CPU, sharpness: float = 12.0, eps: float = 1e-6, padding: int = 0, layers: int = 6
) -> Target:
    """Build a random Qwen3; `padding` rows of its embeddings and head belong to no token."""
    torch.manual_seed(seed)
    config = tiny_config(vocab_size=VOCAB + padding, num_hidden_layers=layers, rms_norm_eps=eps)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness * 0.15)
        model.lm_head.weight[0] = 0.0
        model.lm_head.weight[VOCAB:] = 0.0
    model.to(device=device.torch_device, dtype=device.dtype)
    return freeze_model(model, tiny_tokenizer(), name="tiny", device=device)


def build_target(model_class: Any, config: Any) -> Target:
    """Build a target of any family, with random weights."""
    torch.manual_seed(0)
    return freeze_model(model_class(config), tiny_tokenizer(), name="other", device=CPU)


def demo_target() -> Target:
    """Load the demo's target in fp32 without compilation, a reference for comparisons."""
    return load_target(TargetConf(), CPU)


def new_draft(target: Target, **conf) -> Eagle3Draft:
    conf = {"layers": LAYERS, "ttt_steps": 4} | conf
    return build_draft(Eagle3Conf(**conf), target, loss=LossConf(name=LossName.soft_ce, step_decay=1.0), seed=0)


def sampled_texts(target: Target, *, count: int, length: int) -> list[list[int]]:
    """Return texts of `length` tokens: four random tokens and the target's greedy continuation."""
    numbers = torch.Generator().manual_seed(1)
    starts = torch.randint(1, VOCAB, (count, 4), generator=numbers).tolist()
    decoder = Decoder(target, sampling=SamplingConf(), slots=length, batch=count)
    answers = decoder.decode(starts, row_ids=list(range(count)), max_new_tokens=length - 4)
    return [start + row.ids for start, row in zip(starts, answers, strict=True)]


def batch_of(texts: list[list[int]]) -> Batch:
    """Build a batch of a text per row, whose answer begins after four tokens."""
    ids = torch.tensor(texts)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return Batch(input_ids=ids, answer_mask=positions >= 4, document_ids=torch.zeros_like(ids), positions=positions)


def learn(draft: Eagle3Draft, target: Target, batch: Batch, *, steps: int, lr: float = 5e-3) -> None:
    """Train the draft on a single batch with Adam and a cosine schedule."""
    with torch.no_grad():
        seen = run_target(target, draft.needs.layers, batch)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(number: int) -> None:
        generators = [np.random.default_rng([0, number, row]) for row in range(len(batch.input_ids))]
        extras = draft.prepare_batch(batch, step=number, generators=generators)
        loss = compute_loss(draft.loss_terms(batch, seen, **extras))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
        schedule.step()

    step(0)
    with skip_shape_checks():
        for number in range(1, steps):
            step(number)


@contextmanager
def skip_shape_checks() -> Iterator[None]:
    """Do not check shapes, for repeated calls whose shapes are checked elsewhere."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def chain(depth: int):
    return TreeConf(kind=TreeKind.chain, depth=depth).build()


def tree(depth: int = 4):
    return TreeConf(depth=depth, nodes=10, beam_width=3, children=3).build()


def mixed():
    return TreeConf(depth=3, nodes=6, beam_width=2, children=3, ngram_tokens=4).build()


def static():
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
    return TreeConf(kind=TreeKind.static, paths=paths).build()
