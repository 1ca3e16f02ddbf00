"""config.json says the same to readers of older and of newer names."""

import copy

import pytest
from transformers import AutoConfig, Gemma3Config

from models.checkpoints import checkpoint_files
from models.checkpoints.transformers4_keys import add_older_keys
from models.drafts.registry import load_draft
from models.targets import architectures
from tests.support.models.saved_configs import LINEAR, NEWER, OLDER, SAVED, build_target, save_draft


@pytest.fixture(scope="module", params=SAVED, ids=lambda case: " ".join(case))
def saved(request, tmp_path_factory):
    """A family, and the folder of a draft of it."""
    family, draft = request.param
    return family, save_draft(family, draft, tmp_path_factory.mktemp("saved") / "checkpoint")


def test_every_checkpoint_says_rope_and_precision_by_their_older_names(saved):
    family, folder = saved
    written = checkpoint_files.read_config(folder)
    assert {key: written[key] for key in OLDER[family]} == OLDER[family]
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_transformers_5_reads_what_it_reads_without_the_older_names(saved):
    family, folder = saved
    written = checkpoint_files.read_config(folder)
    older = {*OLDER[family], "torch_dtype"}
    newer = {key: value for key, value in written.items() if key not in older}
    both, alone = (AutoConfig.for_model(**copy.deepcopy(keys)) for keys in (written, newer))
    assert both.rope_parameters == NEWER[family]().rope_parameters
    assert both.to_dict() == alone.to_dict()


@pytest.mark.parametrize("draft", ["eagle3", "eagle1", "hydra", "draft model"])
def test_a_draft_that_was_read_is_written_as_it_was(draft, tmp_path):
    target = build_target("llama3")
    first = save_draft("llama3", draft, tmp_path / "first")
    again = load_draft(first, target)
    again.save(tmp_path / "second", target)
    before, after = (checkpoint_files.read_config(tmp_path / name) for name in ("first", "second"))
    assert before.items() >= OLDER["llama3"].items()
    names = before.keys() - {"_name_or_path"}  # of a draft model: where it was read from
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


def test_nested_configurations_have_older_names_of_their_own():
    text = NEWER["gemma3"]()
    whole = Gemma3Config(text_config=text.to_dict(), dtype="bfloat16").to_dict()
    before = copy.deepcopy(whole)
    inner = add_older_keys(whole)["text_config"]
    assert {key: inner[key] for key in OLDER["gemma3"]} == OLDER["gemma3"]
    assert whole == before
    again = Gemma3Config(**add_older_keys(whole))
    assert architectures.get_rope_parameters(again.text_config) == architectures.get_rope_parameters(text)


def test_what_has_no_rope_gets_no_keys_of_it():
    assert add_older_keys({"model_type": "medusa", "num_heads": 5}) == {"model_type": "medusa", "num_heads": 5}


def test_a_rotary_part_of_a_head_stands_outside_the_scaling_as_it_did():
    rope = LINEAR | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    written = add_older_keys({"rope_parameters": rope})
    assert (written["rope_scaling"], written["partial_rotary_factor"]) == (LINEAR, 0.5)
