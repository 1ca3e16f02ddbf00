"""EAGLE drafts read the target's embeddings, unless they have trained or other ones."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from data.features.target_pass import run_target
from models.checkpoints import checkpoint
from models.checkpoints.checkpoint_files import WEIGHTS_FILE
from models.drafts.loss import compute_loss
from models.drafts.options import Eagle1Conf, Eagle3Conf
from models.drafts.registry import build_draft, load_draft
from models.losses.config import LossConf
from tests.support.models.tiny import LAYERS, batch_of, new_draft, sampled_texts, tiny_target

TABLE = "embed_tokens.weight"
CONFS = {"eagle1": Eagle1Conf(), "eagle3": Eagle3Conf(layers=LAYERS)}


@pytest.mark.parametrize("method", CONFS)
def test_frozen_embeddings_are_the_targets_and_stand_in_the_checkpoint_for_engines(target, method, tmp_path):
    draft = build_draft(CONFS[method], target, loss=LossConf(), seed=0)
    draft.save(tmp_path, target)
    table = target.model.get_input_embeddings().weight
    assert torch.equal(load_file(tmp_path / WEIGHTS_FILE)[TABLE], table)
    for model in (draft, load_draft(tmp_path, target)):
        assert TABLE not in dict(model.named_parameters())
        assert torch.equal(model.embed(torch.tensor([[3, 5]])), table[[3, 5]][None])


def test_trained_embeddings_stay_the_drafts_own(target, tmp_path):
    draft = new_draft(target, train_embeddings=True)
    table = target.model.get_input_embeddings().weight
    assert torch.equal(draft.embed_tokens.weight, table)
    batch = batch_of(sampled_texts(target, count=1, length=12))
    compute_loss(draft.loss_terms(batch, run_target(target, draft.needs.layers, batch))).total.backward()
    assert draft.embed_tokens.weight.grad.abs().sum() > 0
    with torch.no_grad():
        draft.embed_tokens.weight[7] += 1
    draft.save(tmp_path, target)
    loaded = load_draft(tmp_path, target)
    assert torch.equal(loaded.embed_tokens.weight, draft.embed_tokens.weight)
    assert torch.equal(loaded.embed(torch.tensor([[7]])), (table[7] + 1)[None, None])


def test_embeddings_of_a_checkpoint_from_elsewhere_are_kept(target, tmp_path):
    new_draft(target).save(tmp_path, target)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    tensors[TABLE][4] *= 2
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert torch.equal(load_draft(tmp_path, target).embed_tokens.weight, tensors[TABLE])


def test_embeddings_that_were_rounded_in_training_are_still_the_targets(target, tmp_path):
    """A draft that learned in bf16 is measured in fp32 where near-ties leave the verdict open."""
    new_draft(target).save(tmp_path, target)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    save_file(tensors | {TABLE: tensors[TABLE].bfloat16()}, tmp_path / WEIGHTS_FILE)
    assert TABLE not in dict(load_draft(tmp_path, target).named_parameters())


@pytest.mark.parametrize("method", CONFS)
def test_the_tensors_of_a_checkpoint_are_read_once(target, method, tmp_path, monkeypatch):
    build_draft(CONFS[method], target, loss=LossConf(), seed=0).save(tmp_path, target)
    opened = []

    def record_path(path, **how):
        opened.append(path)
        return safe_open(path, **how)

    monkeypatch.setattr(checkpoint, "safe_open", record_path)
    load_draft(tmp_path, target)
    assert opened == [tmp_path / WEIGHTS_FILE]


def test_embeddings_that_the_target_scales_are_copied_without_the_scale():
    class ScaledEmbedding(nn.Embedding):
        def forward(self, input_ids):
            return 4 * super().forward(input_ids)

    target = tiny_target(seed=0)
    table = target.model.get_input_embeddings().weight
    scaled = ScaledEmbedding(*table.shape)
    scaled.weight = table
    target.model.set_input_embeddings(scaled)
    draft = new_draft(target)
    assert torch.equal(draft.embed_tokens.weight, table)
    assert torch.equal(draft.embed(torch.tensor([[3]])), table[3][None, None])


def test_the_other_weights_of_a_draft_that_trains_its_embeddings_start_alike(target):
    """So the report's untrained draft, which is built from the checkpoint, is the one that training began with."""
    with_table, without = (new_draft(target, train_embeddings=trains) for trains in (True, False))
    assert all(torch.equal(with_table.state_dict()[name], tensor) for name, tensor in without.state_dict().items())
