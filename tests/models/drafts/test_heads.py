"""Medusa and Hydra keep promises of their heads beyond tests/models/test_promises.py."""

import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.checkpoints.checkpoint_files import read_config
from models.drafts.loss import compute_loss
from models.drafts.options import HydraConf, LoraConf, Medusa2Conf, MedusaConf
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.losses.config import LossConf, LossName
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind
from tests.support.models.methods import CASES
from tests.support.models.saved_configs import edit_config
from tests.support.models.tiny import VOCAB, batch_of, chain, learn, sampled_texts, tree
from tests.support.models.watching import watch_rounds
from tests.support.runs import toy_run
from train.config.optim import OptimConf
from train.optim import build_optimizers

SIZE = 32
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
BUSHY = TreeConf(kind=TreeKind.static, paths=PATHS).build()


def read_shapes(folder) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def build(conf, target):
    return build_draft(conf, target, loss=LossConf(name=LossName.soft_ce, step_decay=1.0), seed=0)


def build_batch(target):
    return batch_of(sampled_texts(target, count=4, length=24))


def test_medusa_is_saved_in_the_layout_that_vllm_reads(target, tmp_path):
    blocks = {
        f"blocks.{i}.layers.{j}.{part}": shape
        for i in range(3)
        for j in range(2)
        for part, shape in [("weight", [SIZE, SIZE]), ("bias", [SIZE])]
    }
    build(MedusaConf(heads=3, num_layers=2), target).save(tmp_path / "separate", target)
    heads = {f"lm_heads.{i}.weight": [VOCAB, SIZE] for i in range(3)}
    assert read_shapes(tmp_path / "separate") == blocks | heads
    build(MedusaConf(heads=3, num_layers=2, separate_lm_heads=False), target).save(tmp_path / "shared", target)
    assert read_shapes(tmp_path / "shared") == blocks | {"lm_head.weight": [VOCAB, SIZE]}
    draft = load_draft(tmp_path / "shared", target)
    assert draft.conf.separate_lm_heads is False
    assert draft.config.original_lm_head
    assert draft.config.model_type == "medusa"


def test_a_medusa_draft_that_was_converted_for_vllm_needs_no_further_keys(target, tmp_path):
    """abhigoyal/vllm-medusa-vicuna-7b-v1.3 has no `original_lm_head`; vLLM's defaults are those of its MedusaConfig."""
    draft = build(MedusaConf(heads=2), target)
    draft.config.medusa_fc_bias = False  # as in vLLM by default, whose blocks then have none
    draft.save(tmp_path, target)
    edit_config(tmp_path, drop=("original_lm_head", "medusa_fc_bias", "num_hidden_layers", "hidden_size", "vocab_size"))
    draft = load_draft(tmp_path, target)
    assert (draft.conf.heads, draft.conf.num_layers, draft.conf.separate_lm_heads) == (2, 1, True)
    edit_config(tmp_path, drop=("num_heads",))
    with pytest.raises(UserError, match=r"keys and values of a medusa draft, got .*num_heads"):
        load_draft(tmp_path, target)


def test_an_untrained_medusa_repeats_the_targets_own_guess(target):
    text = sampled_texts(target, count=1, length=30)[0]
    draft = build(MedusaConf(heads=3, num_layers=2), target)
    decoder = Decoder(target, draft, chain(3), sampling=SamplingConf(), slots=64)
    rounds = []
    watch_rounds(decoder, lambda tree, ids, count: rounds.append((tree.ids[0].tolist(), ids[0, count[0] - 1])))
    (row,) = decoder.decode([text[:9]], row_ids=[0], max_new_tokens=8)
    root = row.ids[0]
    for proposed, last in rounds:
        assert proposed == [root] * 3
        root = int(last)


def test_no_two_blocks_share_weights(target):
    """`Sequential(*[block] * n)` is a fault that several toolkits have shipped."""
    for conf in (MedusaConf(heads=3, num_layers=3), HydraConf(heads=3, num_layers=3)):
        draft = build(conf, target)
        places = [p.data_ptr() for p in draft.parameters()]
        assert len(set(places)) == len(places)
        learn(draft, target, build_batch(target), steps=3)
        square = [p for p in draft.parameters() if p.shape == (SIZE, SIZE)]
        assert not any(torch.equal(a, b) for i, a in enumerate(square) for b in square[:i])


@pytest.mark.parametrize("conf_class", [MedusaConf, HydraConf])
def test_a_shared_head_stays_that_of_the_target(target, tmp_path, conf_class):
    draft = build(conf_class(heads=3, separate_lm_heads=False), target)
    learn(draft, target, build_batch(target), steps=5)
    draft.save(tmp_path, target)
    loaded = load_draft(tmp_path, target)
    assert loaded.conf.separate_lm_heads is False
    (head,) = loaded.heads
    assert torch.equal(head.weight, target.head.weight)


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_is_saved_under_the_names_of_its_authors(target, tmp_path, prefix):
    build(HydraConf(heads=2, num_layers=2, prefix=prefix), target).save(tmp_path, target)
    shapes = read_shapes(tmp_path)
    first, second, head = ("1", "3", ".1") if prefix else ("0", "1", "")  # with a prefix, dropouts stand between
    assert shapes[f"hydra_mlp.1.{first}.linear.weight"] == [SIZE, 3 * SIZE]
    assert shapes[f"hydra_mlp.1.{first}.res_connection.weight"] == [SIZE, 3 * SIZE]
    assert shapes[f"hydra_mlp.1.{second}.linear.weight"] == [SIZE, SIZE]
    assert shapes[f"hydra_lm_head.1{head}.weight"] == [VOCAB, SIZE]
    assert shapes[f"hydra_lm_head.1{head}.bias"] == [VOCAB]
    assert read_config(tmp_path)["grounded_heads"]
    assert ("prefix_embeding_layer.layers.0.self_attn.q_proj.weight" in shapes) == prefix
    assert ("prefix_embeding_layer.norm.weight" in shapes) == prefix


def test_hydras_heads_with_a_bias_are_refused(target, tmp_path):
    build(HydraConf(heads=2), target).save(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["hydra_lm_head.0.1.bias"][3] = 1.0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(UserError, match=r"^checkpoint: vocabulary heads must have no bias but 0, got others; "):
        load_draft(tmp_path, target)


def test_hydras_heads_see_the_tokens_before_them_and_medusas_do_not(target):
    """Children of two siblings are equal for independent heads, and differ for dependent heads."""
    text = sampled_texts(target, count=1, length=30)[0]
    for conf, differs in ((MedusaConf(heads=3), False), (HydraConf(heads=3, prefix=False), True)):
        draft = build(conf, target)
        learn(draft, target, build_batch(target), steps=60)
        decoder = Decoder(target, draft, BUSHY, sampling=SamplingConf(), slots=64)
        trees = []
        watch_rounds(decoder, lambda tree, *_: trees.append(tree.ids[0].tolist()))  # noqa: B023
        decoder.decode([text[:9]], row_ids=[0], max_new_tokens=8)
        assert any(ids[2:4] != ids[4:6] for ids in trees) == differs


def test_hydras_dropout_is_before_every_block_and_head_and_not_in_decoding(target, tmp_path):
    conf = HydraConf(heads=2, num_layers=3, dropout=0.25)
    draft, batch = build(conf, target), build_batch(target)
    generators = [np.random.default_rng(row) for row in range(4)]
    mask = draft.prepare_batch(batch, step=0, generators=generators)["dropout_mask"]
    # The second head reads a hidden state and two embeddings; later blocks and the head read a single state.
    assert mask.shape == (*batch.input_ids.shape, (3 + 2 + 1) * SIZE)
    assert mask.float().mean() == pytest.approx(0.75, abs=0.01)

    @torch.no_grad()
    def total(**changes):
        return float(compute_loss(draft.loss_terms(batch, run_target(target, [], batch), **changes)).total)

    everything = torch.ones_like(mask)
    for part in range(6):
        dropped = everything.clone()
        dropped[..., part * SIZE : (part + 1) * SIZE] = False
        assert total(dropout_mask=dropped) != total(dropout_mask=everything)
    draft.save(tmp_path, target)
    build(HydraConf(heads=2, num_layers=3), target).save(tmp_path / "plain", target)
    assert read_shapes(tmp_path) == read_shapes(tmp_path / "plain")
    assert load_draft(tmp_path, target).conf.dropout == 0


# --- Medusa-2 -----------------------------------------------------------------------------------


def build_adapted(target, **conf):
    return build(Medusa2Conf(heads=3, lora=LoraConf(rank=8), **conf), target)


def measure_change(draft, target) -> float:
    """Measure the KL divergence of the adapted target from the original on some texts."""
    ids = torch.tensor(sampled_texts(target, count=4, length=24))
    with torch.no_grad():
        before, after = (
            model(ids).logits.log_softmax(-1) for model in (target.model, draft.get_adapted_target(target).model)
        )
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_untrained_adapters_change_no_output(target):
    assert measure_change(build_adapted(target), target) == 0.0


@pytest.mark.slow
def test_self_distillation_limits_the_change_of_the_target(target):
    far, near = build_adapted(target, keep_weight=0.0), build_adapted(target, keep_weight=1.0)
    for draft in (far, near):
        learn(draft, target, build_batch(target), steps=150)
    assert 0 < measure_change(near, target) < 0.3 * measure_change(far, target)


def test_adapters_share_the_targets_weights(target):
    draft = build_adapted(target)
    shared = {p.data_ptr() for p in target.model.parameters()}
    theirs = {p.data_ptr() for p in draft.lm.model.parameters()}
    assert shared <= theirs
    assert not any(p.data_ptr() in shared for p in draft.parameters())


def test_the_heads_weight_rises_as_a_sine(target):
    draft, batch = build_adapted(target, heads_warmup=4), build_batch(target)
    risen = [draft.prepare_batch(batch, step=step, generators=[])["ramp"] for step in range(6)]
    expected = [math.sin(min(step / 4, 1) * math.pi / 2) for step in range(1, 7)]
    assert [float(ramp) for ramp in risen] == pytest.approx(expected)


def test_a_run_with_an_adapted_target_saves_its_last_step(tmp_path, monkeypatch):
    """Acceptance must not choose the step: a target that repeats itself is accepted best of all."""
    lengths = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr(toy_run, "toy_length", lambda _draft: {"delivered_per_round": next(lengths)})
    _, progress = toy_run.toy_run(tmp_path, toy_run.toy_conf(draft=CASES["medusa2"].conf))
    assert (progress.step, progress.best_step) == (12, 12)


def test_the_adapted_target_is_saved_as_a_plain_model(target, tmp_path):
    draft = build_adapted(target, heads_weight=1.0)
    learn(draft, target, build_batch(target), steps=30)
    draft.save(tmp_path, target)
    (folder,) = tmp_path.glob("target-*")
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(plain(ids).logits, draft.lm.model(ids).logits)
    assert not torch.equal(plain(ids).logits, target.model(ids).logits)

    learn(draft, target, build_batch(target), steps=5)
    draft.save(tmp_path, target)
    (other,) = tmp_path.glob("target-*")  # that of the earlier save is gone
    assert other != folder
    again = load_draft(tmp_path, target)
    own = again.get_adapted_target(target)
    assert own.fingerprint != target.fingerprint
    decoder = Decoder(own, again, tree(3), sampling=SamplingConf(), slots=64)
    (row,) = decoder.decode([[5, 6, 7]], row_ids=[0], max_new_tokens=20)
    expected = AutoModelForCausalLM.from_pretrained(other).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=20, eos_token_id=-1
    )
    assert row.ids == expected[0, 3:].tolist()


REFUSED = {
    "keep_weight": {"keep_weight": -1.0},
    "heads_weight": {"heads_weight": -0.1},
    "heads_warmup": {"heads_warmup": -3},
    "heads_lr_scale": {"heads_lr_scale": 0.0},
    "lora.rank": {"lora": LoraConf(rank=0)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_weight_below_zero_and_a_rank_of_zero_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"^draft\.{name}: must be "):
        Medusa2Conf(**REFUSED[name])


def test_heads_of_medusa2_keep_their_rate_on_a_device_that_makes_new_parameters(target):
    """PyTorch/XLA's tensors cannot take the place of a host's, which this switch does on a CPU."""
    conf = Medusa2Conf(heads=2, lora=LoraConf(rank=2), heads_lr_scale=3.0)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        draft = build_draft(conf, target, loss=LossConf(), seed=0)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    optimizers, _ = build_optimizers(OptimConf(lr=1.0), draft)
    assert {group["initial_lr"] for optimizer in optimizers for group in optimizer.param_groups} == {1.0, 3.0}
