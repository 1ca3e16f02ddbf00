"""EAGLE-3 keeps promises of its layer, vocabulary and training beyond test_promises.py."""

import numpy as np
import pytest
import torch

from data.features.target_pass import run_target
from data.vocabulary.draft_vocab import choose_kept_ids
from infer.engine.decode import Decoder
from models.drafts.base import ReadPrompts
from models.drafts.bases.cached import CachePass
from models.drafts.eagle3 import NORM_SWITCHES
from models.drafts.loss import compute_loss
from models.drafts.options import CausalLMConf, Eagle1Conf, Eagle3Conf, InitFrom
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.layers import RMSNorm, drop_inputs
from models.losses.config import LossConf
from models.targets.language_model import TargetOutput
from models.trees.sampling_config import SamplingConf
from tests.support.models.methods import choose_varied_text, measure_share_of_maximum
from tests.support.models.saved_configs import edit_config
from tests.support.models.tiny import LAYERS, VOCAB, batch_of, chain, learn, new_draft, tiny_target, tree


@pytest.fixture(scope="module")
def sample(target):
    return choose_varied_text(target)


def test_a_learned_text_is_accepted_with_a_reduced_vocabulary_and_not_with_layers_or_a_map_off_by_1(target, sample):
    draft = new_draft(target, vocab_size=VOCAB - 8)
    counts = torch.bincount(torch.tensor(sample), minlength=VOCAB)
    draft.set_vocabulary(choose_kept_ids(counts, VOCAB - 8, required_ids=[0]), target)
    learn(draft, target, batch_of([sample]), steps=500)
    assert measure_share_of_maximum(target, draft, sample) >= 0.9
    layers = draft.needs.layers
    draft.needs.layers = [layer - 1 for layer in layers]
    assert measure_share_of_maximum(target, draft, sample) < 0.9
    draft.needs.layers = layers
    draft.d2t += 1
    draft.d2t[-1] = 0
    assert measure_share_of_maximum(target, draft, sample) < 0.9


def test_unrolled_training_steps_equal_the_steps_of_decoding(target, learned):
    """Teacher-forced outputs of the training graph equal those of the cached decoder layer."""
    draft, texts = learned
    batch = batch_of(texts[:1])
    seen = run_target(target, draft.needs.layers, batch)
    with torch.no_grad():
        outputs = draft.unroll_steps(batch, draft.target_features(seen))
        row = 11
        prompt = TargetOutput(hidden=seen.hidden[:, : row + 1], captured=seen.captured[:, : row + 1])
        prompts = ReadPrompts(
            ids=batch.input_ids[:, : row + 1],
            lengths=torch.tensor([row + 1]),
            first_token=batch.input_ids[:, row + 1],
            target_output=prompt,
        )
        state = draft.start(draft.new_state(1, 32), prompts)
        torch.testing.assert_close(state["hidden"], outputs[0][:, row], atol=1e-5, rtol=1e-4)
        hidden = state["hidden"][:, None]
        for step in range(1, draft.trained_depth):
            # `row` is the last row of the prompt: drafted rows follow it
            position, mask = torch.tensor([[row + step]]), torch.arange(33)[None, None, None] <= row + step
            cache_pass = CachePass(positions=position, slots=position, mask=mask)
            hidden = draft.forward_step(state, batch.input_ids[:, row + 1 + step][:, None], hidden, cache_pass)
            torch.testing.assert_close(hidden[:, 0], outputs[step][:, row], atol=1e-5, rtol=1e-4)


SWITCHES = {
    "plain": (),
    "residual": ("norm_before_residual",),
    "fc": ("norm_before_fc",),
    "output": ("norm_output",),
    "all": NORM_SWITCHES,
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_norm_switches_are_those_of_the_published_layout(target, sample, switches):
    """Two steps of a position are written out here in the order in which vLLM applies the norms."""
    norms = {name: name in switches for name in NORM_SWITCHES}
    draft = new_draft(target, ttt_steps=2, **norms)
    with torch.no_grad():
        for norm in (part for part in draft.modules() if isinstance(part, RMSNorm)):
            norm.weight.uniform_(0.5, 2.0)
    weights = draft.checkpoint_tensors()
    assert ("input_norm.weight" in weights) == ("norm_before_fc" in switches)

    def normalize(x, name):
        x = x * (x.pow(2).mean(-1, keepdim=True) + draft.config.rms_norm_eps).rsqrt()
        return x * weights[f"{name}.weight"]

    batch = batch_of([sample[:2]])
    seen = run_target(target, draft.needs.layers, batch)
    captured = seen.captured[:, :1]
    if "norm_before_fc" in switches:
        captured = normalize(captured, "input_norm")
    feature = captured @ weights["fc.weight"].T
    embedded = weights["embed_tokens.weight"][sample[1]]
    hidden = normalize(feature, "midlayer.hidden_norm")
    stream = hidden if "norm_before_residual" in switches else feature
    wide = torch.cat([normalize(embedded, "midlayer.input_layernorm").expand_as(hidden), hidden], -1)
    value = wide @ weights["midlayer.self_attn.v_proj.weight"].T  # all that position 0 attends to
    groups = draft.config.num_attention_heads // draft.config.num_key_value_heads
    value = value.unflatten(-1, (-1, draft.config.head_dim)).repeat_interleave(groups, -2)
    stream = stream + value.flatten(-2) @ weights["midlayer.self_attn.o_proj.weight"].T
    entered = normalize(stream, "midlayer.post_attention_layernorm")
    gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    output = stream + (torch.nn.functional.silu(entered @ gate.T) * (entered @ up.T)) @ down.T
    carried = normalize(output, "norm") if "norm_output" in switches else output
    logits = normalize(output, "norm") @ weights["lm_head.weight"].T
    with torch.no_grad():
        first, second = draft.unroll_steps(batch, draft.target_features(seen))
        torch.testing.assert_close(first[:, :1], carried, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(draft.logits(first[:, :1]), logits, atol=1e-5, rtol=1e-4)
    assert not torch.equal(first, second)


def test_the_untrained_draft_is_rebuilt_from_the_checkpoint(target, learned, tmp_path):
    draft, _ = learned
    draft.save(tmp_path, target)
    again = load_draft(tmp_path, target)
    before = again.rebuild_untrained(target)
    assert torch.equal(before.fc.weight, new_draft(target).fc.weight)


@pytest.mark.parametrize("layers", [[3, 1, 5], [1, 1, 2], [1, 2, 6]])
def test_impossible_captured_layers_are_refused(target, layers):
    with pytest.raises(UserError, match=r"draft\.layers"):
        new_draft(target, layers=layers)


def test_captured_layers_that_the_target_lacks_are_refused_before_decoding(target, tmp_path):
    new_draft(target).save(tmp_path, target)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 99])
    with pytest.raises(UserError, match=r"^checkpoint: its captured layers must lie in 0\.\.5 .*, got \[0, 1, 99\]; "):
        load_draft(tmp_path, target)


@pytest.mark.parametrize("change", [{"num_attention_heads": 3}, {"hidden_size": "32"}])
def test_values_that_a_config_cannot_have_are_refused_in_one_line(target, tmp_path, change):
    new_draft(target).save(tmp_path, target)
    edit_config(tmp_path, **change)
    with pytest.raises(UserError, match=r"^checkpoint: config.json must have the keys and values of a eagle3 draft"):
        load_draft(tmp_path, target)


def test_a_draft_vocabulary_is_at_most_the_targets(target):
    assert new_draft(target, vocab_size=VOCAB + 1).config.draft_vocab_size == VOCAB


def test_a_tree_deeper_than_the_draft_is_refused(target):
    with pytest.raises(UserError, match=r"tree\.depth"):
        Decoder(target, new_draft(target, max_depth=3), tree(), sampling=SamplingConf(), slots=32)


@pytest.mark.parametrize("depth", range(1, 9))
def test_every_depth_of_target_has_layers_that_a_draft_captures_by_default(depth):
    target = tiny_target(seed=0, layers=depth)
    draft = new_draft(target, layers=None)
    chosen = draft.needs.layers
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(depth, 3)
    if depth >= 7:  # the default of engines for a checkpoint without the key
        assert chosen == [2, depth // 2, depth - 3]
    assert draft.config.eagle_aux_hidden_state_layer_ids == chosen
    plain, drafting = (
        Decoder(target, sampling=SamplingConf(), slots=32),
        Decoder(target, draft, chain(3), sampling=SamplingConf(), slots=32),
    )
    (expected,) = plain.decode([[1, 2, 3]], row_ids=[0], max_new_tokens=8)
    (drafted,) = drafting.decode([[1, 2, 3]], row_ids=[0], max_new_tokens=8)
    assert drafted.ids == expected.ids


def test_layers_that_a_small_target_lacks_are_refused_with_its_own_layers():
    target = tiny_target(seed=0, layers=4)
    rule = r"draft\.layers: must lie in 0\.\.3 for target tiny, got \[2, 18, 33\]"
    with pytest.raises(UserError, match=rule + r"; null takes \[1, 2, 3\]$"):
        new_draft(target, layers=[2, 18, 33])
    with pytest.raises(UserError, match=r"got \[4\]; null takes \[0\]$"):
        build_draft(CausalLMConf(init_from=InitFrom.pruned, layers=[4]), target, loss=LossConf(), seed=0)


def test_dropout_zeroes_inputs_in_training_only_and_keeps_their_mean(target):
    """The numbers belong to the rows: every order and split of a batch draws the same numbers."""
    draft = new_draft(target, dropout=0.25)
    batch = batch_of([list(range(1, 13)), list(range(3, 15))])
    mask = draft.prepare_batch(batch, step=0, generators=build_generators(0, 1))["dropout_mask"]
    backwards = draft.prepare_batch(batch, step=0, generators=build_generators(1, 0))["dropout_mask"]
    assert torch.equal(backwards, mask.flip(0))
    inputs = torch.randn(mask.shape).exp()
    dropped = drop_inputs(inputs, mask, dropout=0.25)
    assert torch.equal(dropped == 0, ~mask)
    assert float(dropped.mean()) == pytest.approx(float(inputs.mean()), rel=0.1)
    assert torch.equal(drop_inputs(inputs, None, dropout=0.25), inputs)
    assert new_draft(target).prepare_batch(batch, step=0, generators=build_generators(0, 1)) == {}


@pytest.mark.parametrize("conf", [Eagle3Conf(layers=LAYERS, dropout=0.5), Eagle1Conf(dropout=0.5, feature_noise=0.0)])
def test_dropout_zeroes_what_the_layer_reads(target, conf):
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    batch = batch_of([list(range(1, 13))])
    output = run_target(target, draft.needs.layers, batch)
    extras = draft.prepare_batch(batch, step=0, generators=build_generators(0))
    kept = torch.ones_like(extras["dropout_mask"])
    dropped, whole = (
        compute_loss(draft.loss_terms(batch, output, **extras | {"dropout_mask": mask})).total
        for mask in (extras["dropout_mask"], kept)
    )
    assert dropped != whole


def build_generators(*rows: int) -> list[np.random.Generator]:
    return [np.random.default_rng([0, 0, row]) for row in rows]
