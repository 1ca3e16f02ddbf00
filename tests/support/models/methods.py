"""Configure every method in a small size, for the target of tests/support/models/tiny.py."""

from dataclasses import dataclass

import pytest

from infer.engine.decode import Decoder
from models.drafts.base import Draft
from models.drafts.options import (
    CausalLMConf,
    DraftConf,
    Eagle1Conf,
    Eagle3Conf,
    HydraConf,
    InitFrom,
    LoraConf,
    Medusa2Conf,
    MedusaConf,
)
from models.drafts.registry import build_draft
from models.losses.config import LossConf, LossName
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import LAYERS, chain, sampled_texts


@dataclass(frozen=True, kw_only=True)
class MethodCase:
    """A method, and the learning rate at which it learns a text in seconds."""

    conf: DraftConf
    lr: float = 5e-3

    def build(self, target: Target, *, loss: LossName = LossName.soft_ce) -> Draft:
        return build_draft(self.conf, target, loss=LossConf(name=loss, step_decay=1.0), seed=0)


DEPTH = 4  # of the chains that are measured
PRUNED = {"init_from": InitFrom.pruned, "layers": [0, 5]}
CASES = {
    "eagle3": MethodCase(conf=Eagle3Conf(layers=LAYERS, ttt_steps=4)),
    "eagle3, paper": MethodCase(
        conf=Eagle3Conf(layers=LAYERS, ttt_steps=4, norm_before_residual=False, norm_before_fc=False)
    ),
    "eagle3, three norms": MethodCase(conf=Eagle3Conf(layers=LAYERS, ttt_steps=4, train_head=False, norm_output=True)),
    "eagle1": MethodCase(conf=Eagle1Conf(token_loss_weight=1.0, feature_noise=0.0)),
    "hass": MethodCase(conf=Eagle1Conf(token_loss_weight=1.0, feature_noise=0.0, ttt_steps=4)),
    "medusa": MethodCase(conf=MedusaConf(heads=4), lr=2e-2),
    "medusa2": MethodCase(
        conf=Medusa2Conf(heads=4, lora=LoraConf(rank=8), heads_weight=1.0, heads_lr_scale=2.0), lr=1e-2
    ),
    "hydra": MethodCase(conf=HydraConf(prefix=False)),
    "hydra++": MethodCase(conf=HydraConf(num_layers=2)),
    "draft model": MethodCase(conf=CausalLMConf(**PRUNED)),
    "draft model, random": MethodCase(conf=CausalLMConf(**PRUNED | {"init_from": InitFrom.random})),
    "draft model, LoRA": MethodCase(conf=CausalLMConf(**PRUNED, lora=LoraConf(rank=8))),
}

# The quick tests take a case of each class of drafts, the system tests take all cases.
QUICK = ("eagle3", "eagle1", "medusa", "medusa2", "hydra++", "draft model")
EVERY_CASE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.system) for name in CASES]


def choose_varied_text(target: Target) -> list[int]:
    """Return the text of the target with the most distinct tokens, in which both position and content matter."""
    return max(sampled_texts(target, count=8, length=42), key=lambda text: len(set(text)))


def measure_share_of_maximum(verifier, draft, text):
    """Measure the acceptance length on a learned text, as a share of the chain's depth + 1."""
    decoder = Decoder(verifier, draft, chain(DEPTH), sampling=SamplingConf(), slots=64)
    (row,) = decoder.decode([text[:5]], row_ids=[0], max_new_tokens=30)
    assert row.ids == text[5:35]
    accepted = row.accepted[:-1]  # the last round reads past the text
    return (1 + sum(accepted) / len(accepted)) / (DEPTH + 1)
