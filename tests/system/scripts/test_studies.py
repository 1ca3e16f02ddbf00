"""The study's table says what its runs accepted."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file

from conf.entry import compose
from data.eval_prompts.prompts import load_eval_prompts
from data.packing import sampler
from data.packing.documents import Packed
from models.drafts.base import Batch
from models.drafts.eagle3 import Eagle3Draft
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer
from scripts.studies import eagle3, variants
from tests.support.models.tiny import new_draft
from tests.support.runs.toy_run import toy_conf, toy_rows, toy_run, toy_target
from train.config.run import TrainConf
from train.trainer import Trainer

ROUNDS = {  # accepted draft tokens of each round, prompt by prompt
    "base": [[0, 1], [2, 0, 1]],
    "two norms": [[1, 2], [4, 0, 2]],
}


@pytest.fixture
def args(tmp_path):
    chosen = argparse.Namespace(output=tmp_path, settings=list(ROUNDS), seeds=[0, 1])
    for setting, rounds in ROUNDS.items():
        folder = eagle3.run_folder(setting, 0, chosen)
        folder.mkdir()
        (folder / "accepted.json").write_text(json.dumps(rounds))
    return chosen


def test_the_table_has_tau_and_the_shares_of_rounds_that_got_that_deep(args):
    *_, base, norms = eagle3.render_table(args).splitlines()
    assert base.split(" | ")[1:4] == ["1.80", "1.80", ""]  # 9 tokens in 5 rounds; seed 1 is missing
    assert norms.split(" | ")[2] == "2.80"  # 14 in 5
    assert base.endswith("| 0.60 0.20 0.00 0.00 |")
    assert norms.endswith("| 0.80 0.60 0.20 0.20 |")
    assert "+1.00" in norms


def test_a_setting_without_a_run_is_left_out(args):
    args.settings = ["base", "output"]
    assert len(eagle3.render_table(args).splitlines()) == 3


def test_every_setting_is_a_valid_run():
    from conf.entry import compose
    from train.config.run import TrainConf

    for setting in eagle3.SETTINGS.values():
        module, overrides = eagle3.name_module(setting)
        assert module == ["train"] or module[1] in variants.VARIANTS
        compose("train", TrainConf, [*eagle3.BASE, "optim.steps=400", *overrides])


def test_a_copied_token_is_one_that_lookup_would_propose_from_its_own_document():
    input_ids = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8, 9]])
    document_ids = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1]])
    batch = Batch(
        input_ids=input_ids,
        answer_mask=torch.ones_like(input_ids, dtype=torch.bool),
        document_ids=document_ids,
        positions=torch.zeros_like(input_ids),
    )
    copied = variants.find_copied_tokens(batch)
    assert copied.nonzero()[:, 1].tolist() == [5]  # only the second 7 8 is followed by a known 9


@pytest.fixture
def replaced(monkeypatch):
    """Functions that variants replace, restored after the test."""
    for owner, name in (
        (Trainer, "optimizer_step"),
        (Trainer, "_evaluate_draft"),
        (Eagle3Draft, "copy_target_weights"),
        (sampler, "_shuffle_rows"),
        (Packed, "batch"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_the_average_is_judged_and_saved_and_training_goes_on_without_it(replaced, tmp_path):
    plain, _ = toy_run(tmp_path / "plain", toy_conf(interval={"eval": 12}))
    variants.VARIANTS["ema"]()
    averaged, _ = toy_run(tmp_path / "ema", toy_conf(interval={"eval": 12}))
    assert torch.equal(plain.mix.weight, averaged.mix.weight)
    saved, last = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors")["mix.weight"] for name in ("ema", "plain")
    )
    initial = build_draft(toy_conf().draft, toy_target(), loss=LossConf(), seed=0).mix.weight
    assert 0 < (saved - initial).norm() < (last - initial).norm()


def test_the_layer_starts_as_the_targets_last(replaced, target):
    variants.VARIANTS["last_layer"]()
    draft, last = new_draft(target), target.decoder.layers[-1]
    assert torch.equal(draft.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    queries, size = draft.midlayer.self_attn.q_proj.weight, target.hidden_size
    assert torch.equal(queries[:, size:], last.self_attn.q_proj.weight)


def test_rows_of_short_documents_come_first(replaced):
    variants.VARIANTS["by_length"]()
    order = sampler.RowOrder(num_rows=6, rows_per_step=4, seed=0)
    assert order.batch_rows(0) == [5, 4, 3, 2]
    assert order.batch_rows(1) == [1, 0, 5, 4]


def test_copied_tokens_become_context(replaced):
    plain = toy_rows().batch([0])
    variants.VARIANTS["ngram_hard"]()
    batch = toy_rows().batch([0])
    assert torch.equal(batch.input_ids, plain.input_ids)
    assert torch.equal(batch.context_mask, variants.find_copied_tokens(plain))


def test_settings_are_chosen_on_held_out_prompts_that_the_demo_does_not_report():
    tokenizer = load_tokenizer(TargetConf())
    limit = compose("train", TrainConf, []).evaluation.prompts_per_category
    chosen_on = {prompt.id for prompt in eagle3.load_unreported_prompts(tokenizer)}
    reported = {prompt.id for prompt in load_eval_prompts(tokenizer, None, limit=limit)}
    assert len(chosen_on) == len(reported) == 32
    assert not chosen_on & reported
