"""Build a target of sixteen words and drafts that partly agree with it, cheap enough to sample in bulk."""

import copy
from functools import partial

import torch
from transformers import Qwen3ForCausalLM

from data.vocabulary.draft_vocab import choose_kept_ids
from infer.engine.decode import Decoder
from models.batch import Batch
from models.drafts.base import Draft
from models.drafts.causal_lm import CausalLMDraft
from models.drafts.options import CausalLMConf, Eagle3Conf, MedusaConf
from models.drafts.registry import build_draft
from models.losses.config import LossConf, LossName
from models.targets.loading import freeze_model
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind
from tests.support.models.tiny import CPU, add_noise, batch_of, learn, tiny_config, tiny_tokenizer
from tests.support.runs.trained_once import TrainedOnce

WORDS = 16
LAYERS = [0, 1, 2]
DEPTH = 2
METHODS = ("eagle3", "eagle3, reduced", "medusa", "draft model")
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]
SHAPES: dict[str, Tree] = {
    "chain": TreeConf(kind=TreeKind.chain, depth=DEPTH).build(),
    "static": TreeConf(kind=TreeKind.static, paths=PATHS).build(),
    "dynamic": TreeConf(depth=DEPTH, nodes=5, beam_width=2, children=3).build(),
    "product": TreeConf(depth=DEPTH, nodes=6, beam_width=None, children=3).build(),
    "chain, copied": TreeConf(kind=TreeKind.chain, depth=DEPTH, ngram_tokens=2).build(),
    "static, copied": TreeConf(kind=TreeKind.static, paths=PATHS, ngram_tokens=2).build(),
    "dynamic, copied": TreeConf(depth=DEPTH, nodes=4, beam_width=2, children=2, ngram_tokens=2).build(),
}


def build_small_target() -> Target:
    torch.manual_seed(5)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 32}
    config = tiny_config(**sizes, initializer_range=0.4)
    return freeze_model(Qwen3ForCausalLM(config), tiny_tokenizer(WORDS), name="small", device=CPU)


def build_small_drafts(target: Target, trained_once: TrainedOnce) -> dict[str, Draft]:
    """Train drafts briefly on sampled texts; the draft model is the target with noise on its weights."""
    batch = sample_batch(target)
    loss = LossConf(name=LossName.soft_ce, step_decay=1.0)
    eagle = build_draft(Eagle3Conf(layers=LAYERS, ttt_steps=2), target, loss=loss, seed=0)
    reduced = Eagle3Conf(layers=LAYERS, ttt_steps=2, vocab_size=10)
    reduced = build_draft(reduced, target, loss=loss, seed=0)
    counts = batch.input_ids.flatten().bincount(minlength=WORDS)
    reduced.set_vocabulary(choose_kept_ids(counts, 10, required_ids=[0]), target)
    heads = build_draft(MedusaConf(heads=DEPTH), target, loss=loss, seed=0)
    for name, draft, rate in zip(METHODS[:3], (eagle, reduced, heads), (1e-2, 1e-2, 2e-2), strict=True):
        train = partial(learn, draft, target, batch, steps=80, lr=rate)
        trained_once.train(f"small {name}", draft, train)
    drafts = [eagle, reduced, heads, noised(target)]
    return {name: draft.eval() for name, draft in zip(METHODS, drafts, strict=True)}


def sample_batch(target: Target) -> Batch:
    decoder = Decoder(target, sampling=SamplingConf(temperature=1.0, seed=9), slots=20, batch=64)
    starts = torch.randint(1, WORDS, (64, 4), generator=torch.Generator().manual_seed(1)).tolist()
    answers = decoder.decode(starts, row_ids=list(range(64)), max_new_tokens=16)
    return batch_of([start + row.ids for start, row in zip(starts, answers, strict=True)])


def noised(target: Target, *, noise: float = 0.15) -> CausalLMDraft:
    model = Qwen3ForCausalLM(target.model.config)
    model.load_state_dict(target.model.state_dict())
    add_noise(model, noise)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return CausalLMDraft(CausalLMConf(name="noised"), model.requires_grad_(False), target)
