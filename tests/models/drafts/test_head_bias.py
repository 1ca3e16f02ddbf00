"""An LM head with a bias is refused by the methods whose loss would leave the bias out."""

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from models.drafts.options import (
    CausalLMConf,
    DraftConf,
    Eagle1Conf,
    Eagle3Conf,
    HydraConf,
    InitFrom,
    Medusa2Conf,
    MedusaConf,
)
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.losses.config import LossConf
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.models.tiny import CPU, LAYERS, tiny_config, tiny_tokenizer


@pytest.fixture(scope="module")
def phi() -> Target:
    torch.manual_seed(0)
    return freeze_model(PhiForCausalLM(tiny_config(PhiConfig)), tiny_tokenizer(), name="phi", device=CPU)


LEARNED_BY_THE_HEAD = [
    Eagle1Conf(),
    Medusa2Conf(),
    CausalLMConf(init_from=InitFrom.pruned),
    MedusaConf(separate_lm_heads=False),
    HydraConf(separate_lm_heads=False),
]


@pytest.mark.parametrize("conf", LEARNED_BY_THE_HEAD)
def test_a_method_that_learns_by_the_weights_of_the_head_is_refused(phi: Target, conf: DraftConf):
    with pytest.raises(UserError, match=rf"^draft.method: {conf.method} .*needs an LM head without a bias, got one"):
        build_draft(conf, phi, loss=LossConf(), seed=0)


@pytest.mark.parametrize("conf", [Eagle3Conf(layers=LAYERS), MedusaConf()])
def test_a_method_with_heads_of_its_own_is_built(phi: Target, conf: DraftConf):
    assert build_draft(conf, phi, loss=LossConf(), seed=0).method == conf.method
