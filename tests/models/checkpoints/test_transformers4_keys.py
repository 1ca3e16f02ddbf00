"""config.json has the same meaning for readers of older and of newer keys."""

import copy

import pytest
from transformers import AutoConfig, Gemma3Config, MellumConfig

from models.checkpoints import checkpoint_files
from models.checkpoints.transformers4_keys import add_older_keys
from models.drafts.registry import load_draft
from models.targets import architectures
from tests.support.models.saved_configs import LINEAR, NEWER, OLDER, SAVED, build_target, save_draft


@pytest.fixture(scope="module", params=SAVED, ids=lambda case: " ".join(case))
def saved(request, tmp_path_factory):
    """Save a draft; return the family of its target and its folder."""
    family, draft = request.param
    return family, save_draft(family, draft, tmp_path_factory.mktemp("saved") / "checkpoint")


def test_every_checkpoint_states_rope_and_precision_by_their_older_keys_too(saved):
    family, folder = saved
    written = checkpoint_files.read_config(folder)
    assert {key: written[key] for key in OLDER[family]} == OLDER[family]
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_transformers_5_reads_the_same_with_and_without_the_older_keys(saved):
    family, folder = saved
    written = checkpoint_files.read_config(folder)
    older = {*OLDER[family], "torch_dtype"}
    newer = {key: value for key, value in written.items() if key not in older}
    both, alone = (AutoConfig.for_model(**copy.deepcopy(keys)) for keys in (written, newer))
    assert both.rope_parameters == NEWER[family]().rope_parameters
    assert both.to_dict() == alone.to_dict()


@pytest.mark.parametrize("draft", ["eagle3", "eagle1", "hydra", "draft model"])
def test_a_loaded_draft_is_saved_with_the_same_config(draft, tmp_path):
    target = build_target("llama3")
    first = save_draft("llama3", draft, tmp_path / "first")
    again = load_draft(first, target)
    again.save(tmp_path / "second", target)
    before, after = (checkpoint_files.read_config(tmp_path / name) for name in ("first", "second"))
    assert before.items() >= OLDER["llama3"].items()
    names = before.keys() - {"_name_or_path"}  # of a draft model: where it was read from
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


def test_nested_configurations_have_their_own_older_keys():
    text = NEWER["gemma3"]()
    config = Gemma3Config(text_config=text.to_dict(), dtype="bfloat16").to_dict()
    before = copy.deepcopy(config)
    inner = add_older_keys(config)["text_config"]
    assert {key: inner[key] for key in OLDER["gemma3"]} == OLDER["gemma3"]
    assert config == before
    again = Gemma3Config(**add_older_keys(config))
    assert architectures.get_rope_parameters(again.text_config) == architectures.get_rope_parameters(text)


def test_a_config_without_rope_gets_no_keys_of_rope():
    assert add_older_keys({"model_type": "medusa", "num_heads": 5}) == {"model_type": "medusa", "num_heads": 5}


def test_a_partial_rotary_factor_stands_outside_the_scaling():
    rope = LINEAR | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    written = add_older_keys({"rope_parameters": rope})
    assert (written["rope_scaling"], written["partial_rotary_factor"]) == (LINEAR, 0.5)


def test_kinds_of_layers_that_are_not_scaled_are_read_again():
    config = MellumConfig(num_hidden_layers=2)
    again = AutoConfig.for_model(**add_older_keys(config.to_dict()))
    assert again.rope_parameters == config.rope_parameters
