"""The inside of transformers is as models/targets/modeling.py assumes.

Each assumption is tested by itself, so that the failing test names what a release breaks.
"""

import inspect
import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import transformers
from transformers import AutoConfig, Cache, LlamaConfig
from transformers.utils.chat_template_utils import render_jinja_template

from models.io.errors import UserError
from models.targets import architectures, modeling
from models.targets.attention import GROUPED_SDPA
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.modeling import CACHE_NAMES, build_rotary, build_thin_model, check_modeling, find_cache_name
from models.targets.pretrained import SHIPPED_CONFIGS
from tests.support.models.family_models import FAMILIES, MORE, family_model
from tests.support.models.tiny import CPU

ALL = FAMILIES | MORE
IDS = torch.tensor([[5, 6, 7]])
POSITIONS = torch.arange(3)[None]
CAUSAL = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()


@dataclass
class LayerCall:
    """The arguments and the output of a call of a layer."""

    args: tuple
    kwargs: dict
    output: object


def record_calls(decoder, **kwargs):
    """Run a decoder; return the call of each layer and the decoder's output."""
    calls = []
    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, output: calls.append(LayerCall(args, kwargs, output)), with_kwargs=True
        )
        for layer in decoder.layers
    ]
    with torch.no_grad():
        output = decoder(input_ids=IDS, position_ids=POSITIONS, use_cache=False, **kwargs)
    for hook in hooks:
        hook.remove()
    return calls, output


class RecordingCache(Cache):
    """A cache without memory that records by which methods and attributes it is used."""

    def __init__(self):
        self.used = set()

    def __getattribute__(self, name):
        if not name.startswith("__") and name != "used":
            self.used.add(name)
        return super().__getattribute__(name)

    def update(self, key_states, value_states, *_args, **_kwargs):
        return key_states, value_states


@pytest.mark.parametrize("family", ALL)
def test_decoder_and_layers_take_the_cache_under_a_single_known_name(family):
    decoder = family_model(family).get_decoder()
    name = find_cache_name(decoder.forward)
    assert name in CACHE_NAMES
    layer, attention = decoder.layers[0], decoder.layers[0].self_attn
    for forward in (layer.forward, attention.forward):
        assert name in inspect.signature(forward).parameters


@pytest.mark.parametrize("family", ALL)
def test_a_decoder_passes_hidden_states_by_position_and_the_cache_by_name(family):
    decoder = family_model(family).get_decoder()
    name = find_cache_name(decoder.forward)
    calls, _ = record_calls(decoder)
    assert all(len(call.args) == 1 and name in call.kwargs for call in calls)


@pytest.mark.parametrize("family", ALL)
def test_a_layer_returns_the_tensor_that_enters_the_next_layer(family):
    decoder = family_model(family).get_decoder()
    calls, output = record_calls(decoder)
    for before, after in pairwise(calls):
        assert after.args[0] is before.output
    with torch.no_grad():
        assert torch.equal(output.last_hidden_state, decoder.norm(calls[-1].output))


@pytest.mark.parametrize("family", ALL)
def test_a_layer_only_updates_its_cache(family):
    decoder = family_model(family).get_decoder()
    calls, _ = record_calls(decoder)
    cache = RecordingCache()
    kwargs = calls[0].kwargs | {find_cache_name(decoder.forward): cache}
    with torch.no_grad():
        output = decoder.layers[0](*calls[0].args, **kwargs)
    assert cache.used == {"update"}
    assert torch.equal(output, calls[0].output)


@pytest.mark.parametrize("family", ALL)
def test_a_decoder_asks_an_empty_cache_only_for_methods_that_ours_has(family):
    decoder = family_model(family).get_decoder()
    masks = architectures.build_layer_masks(decoder.config, CAUSAL, CAUSAL, torch.float32)
    name = find_cache_name(decoder.forward)
    for layer in decoder.layers:
        layer.forward = lambda hidden_states, **_kwargs: hidden_states
    output = decoder(
        input_ids=IDS, position_ids=POSITIONS, attention_mask=masks, use_cache=True, **{name: modeling.PRESENT}
    )
    assert output.last_hidden_state.shape[:2] == IDS.shape


@pytest.mark.parametrize("family", ALL)
def test_masks_in_four_dimensions_are_used_as_they_are(family):
    """Each layer gets our tensor itself, that of its type if there are two types."""
    model = family_model(family)
    text = model.config.get_text_config()
    in_window = None if architectures.get_sliding_window(text) is None else CAUSAL.clone()
    masks = architectures.build_layer_masks(model.config, CAUSAL, in_window, torch.float32)
    calls, _ = record_calls(model.get_decoder(), attention_mask=masks)
    kinds = getattr(text, "layer_types", None) or [None] * len(calls)
    for call, kind in zip(calls, kinds, strict=True):
        expected = masks[kind] if isinstance(masks, dict) else masks
        assert call.kwargs["attention_mask"] is expected


@pytest.mark.parametrize("family", ALL)
def test_the_attention_of_a_loaded_model_is_set_by_its_name(family):
    model = family_model(family)
    modeling.HookedDecoder(model, lambda function: function)
    expected = "eager" if family == "gpt_oss" else GROUPED_SDPA
    assert model.config.get_text_config()._attn_implementation == expected


@pytest.mark.parametrize("implementation", ["eager", "sdpa", GROUPED_SDPA])
def test_each_attention_adds_its_mask_to_the_scores(implementation):
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), attn_implementation=implementation)
    masks = architectures.build_layer_masks(model.config, CAUSAL, None, torch.float32)
    assert masks.dtype == torch.float32
    with torch.no_grad():
        ours = model(input_ids=IDS, position_ids=POSITIONS, attention_mask=masks).logits
        theirs = model(input_ids=IDS).logits
    torch.testing.assert_close(ours, theirs)


def test_a_rotary_module_returns_cosines_and_sines_of_each_position():
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8)
    cos, sin = build_rotary(config)(torch.zeros(1, 3, 32), POSITIONS)
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, 8, 2) / 8)
    angles = (POSITIONS[..., None] * frequencies).repeat(1, 1, 2)
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral", "qwen3_moe"])
def test_models_carry_the_names_that_tensor_parallelism_reads(family):
    model = family_model(family)
    text = model.config.get_text_config()
    assert text.base_model_tp_plan
    assert model._tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    attention = model.get_decoder().layers[0].self_attn
    assert attention.head_dim == architectures.get_head_size(text)
    groups = text.num_attention_heads // text.num_key_value_heads
    assert attention.num_key_value_groups == groups
    assert {"q_proj", "k_proj", "v_proj"} <= {name for name, _ in attention.named_children()}


def test_a_process_mesh_can_be_configured_not_to_wrap_replicas():
    from transformers.distributed.configuration_utils import DistributedConfig

    assert isinstance(DistributedConfig.dp_size, property)
    config = DistributedConfig(tp_size=2, fsdp_size=1, dp_replicate_size=2)
    assert config.dp_size == 2


def test_a_load_reports_missing_unknown_and_misshapen_tensors(tmp_path):
    model = family_model("qwen3")
    model.save_pretrained(tmp_path)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(info)


def test_templates_are_rendered_outside_a_tokenizer():
    messages = [{"role": "user", "content": "Hi"}]
    template = "{{ messages[0].content }}!"
    texts, _ = render_jinja_template(conversations=[messages], chat_template=template)
    assert texts == ["Hi!"]


@pytest.mark.parametrize("family", ALL)
def test_a_thin_model_of_each_family_passes_the_check(family):
    check_modeling(ALL[family](), name="target.name")


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_thin_model_of_each_shipped_shape_passes_the_check(path):
    config = AutoConfig.for_model(**json.loads(path.read_text()))
    model = build_thin_model(config)
    assert len(model.get_decoder().layers) == 1
    assert all(parameter.is_meta for parameter in model.parameters())
    check_modeling(config, name="target.name")


@pytest.fixture
def renamed_cache(monkeypatch):
    """Rename the argument of Qwen3's decoder, as a release of transformers may."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    def forward(self, input_ids, kv_store=None, **kwargs):
        raise AssertionError("the check must not come this far")

    monkeypatch.setattr(Qwen3Model, "forward", forward)
    monkeypatch.setattr(modeling, "_CHECKED", set())


def test_a_family_that_does_not_fit_is_refused_by_name_with_the_version_and_the_lock(renamed_cache):
    with pytest.raises(UserError, match=r"^target\.name.*qwen3 of transformers 5.*family.*locks/dev\.txt") as caught:
        check_modeling(FAMILIES["qwen3"](), name="target.name")
    assert "\n" not in str(caught.value)


def test_a_target_is_checked_before_its_weights_are_read(renamed_cache, tmp_path):
    FAMILIES["qwen3"]().save_pretrained(tmp_path)  # no weights are there to read
    source = TargetConf(path=str(tmp_path))
    with pytest.raises(UserError, match="must take our masks, positions and cache"):
        load_target(source, CPU)
