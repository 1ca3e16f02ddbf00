"""A default stands in its dataclass alone: no YAML of conf/ sets a key to the value that it has without."""

import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from conf.entry import CONF_DIR
from data.config import CaptureConf, ShowConf
from data.prepare_config import PrepareConf
from infer.config import DecodePlanConf, EvalConf, GenerateConf
from infer.tree_file import TreeFileConf
from infer.tuning.config import TuneConf
from models.drafts.options import METHODS
from scripts.recipes import load_data
from train.config.device_check import DeviceCheckConf
from train.config.optim import OptimConf
from train.config.run import TrainConf, TrainPlanConf

COMMANDS = {
    "training": TrainConf,
    "train": TrainConf,
    "train_plan": TrainPlanConf,
    "train_warmup": TrainConf,
    "device_check": DeviceCheckConf,
    "infer_plan": DecodePlanConf,
    "eval": EvalConf,
    "eval_warmup": EvalConf,
    "generate": GenerateConf,
    "tune": TuneConf,
    "tree_file": TreeFileConf,
    "prepare": PrepareConf,
    "capture": CaptureConf,
    "show": ShowConf,
}
# A machine's file is a table of published facts; an experiment or a recipe is laid over what a draft chose.
NO_DEFAULTS = ("machine", "experiment", "recipe", "hydra")
ROOT = Path(CONF_DIR)
DRAFTS = yaml.safe_load((ROOT / "drafts.yaml").read_text())
PUBLISHED = {
    draft: {value["key"] for value in recipe["values"] if "key" in value}
    for recipe in load_data()["recipes"]
    if "recipe" not in recipe  # which is no draft's own
    for draft in recipe["drafts"]
}
OPTIONS = sorted(path for path in ROOT.glob("*/*.yaml") if path.parent.name not in NO_DEFAULTS)


def list_defaults(conf: Any) -> dict[str, Any]:
    """Return the value of each field of a configuration, or of its class."""
    if not isinstance(conf, type):
        return vars(conf)
    fields = dataclasses.fields(conf)
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in fields
    }


def find_repeated_keys(content: dict[str, Any], conf: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a YAML's content that have the value of the configuration without them."""
    defaults = list_defaults(conf)
    kinds = {field.name: field.type for field in dataclasses.fields(conf)}
    for name, value in content.items():
        key, default, kind = prefix + name, defaults[name], kinds[name]
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            yield from find_repeated_keys(value, kind if default is dataclasses.MISSING else default, f"{key}.")
        elif get_origin(kind) is dict and dataclasses.is_dataclass(item := get_args(kind)[1]):
            for part, below in value.items():
                yield from find_repeated_keys(below, item, f"{key}.{part}.")
        elif value == (default.name if isinstance(default, enum.Enum) else default):
            yield key


def read_content(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    return {key: value for key, value in content.items() if key not in ("defaults", "hydra")}


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_an_option_repeats_no_default(path):
    """Only the key that it is named after may, and one whose default differs among the commands with this group."""
    group, content = path.parent.name, read_content(path)
    kinds = [(schema, {field.name: field.type for field in dataclasses.fields(schema)}) for schema in COMMANDS.values()]
    with_group = [
        schema for schema, kind in kinds if group in kind and content.keys() <= list_defaults(kind[group]).keys()
    ]
    repeated = [set(find_repeated_keys({group: content}, schema)) for schema in with_group]
    named_after = {f"{group}.{key}" for key, value in content.items() if value == path.stem}
    assert set.intersection(*repeated) <= named_after


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_repeats_no_default(name):
    assert list(find_repeated_keys(read_content(ROOT / f"{name}.yaml"), COMMANDS[name])) == []


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_repeats_no_default_beyond_its_published_recipe(name):
    entry = DRAFTS[name]
    recipe = {  # what training takes of it
        key: choice
        for key, choice in entry["recipe"].items()
        if not isinstance(choice, str) and key in list_defaults(TrainConf)
    }
    options = {key: value for key, value in entry.items() if key not in ("method", "recipe")}
    repeated = {
        *find_repeated_keys(recipe, TrainConf),
        *find_repeated_keys(options, METHODS[entry["method"]], "draft."),
    }
    assert repeated <= PUBLISHED.get(name, set())


def test_a_repeated_default_is_found():
    content = {"optim": {"lr": 1e-3, "steps": 4, "schedule": "cosine"}, "seed": 0, "tune": False}
    assert list(find_repeated_keys(content, TrainConf)) == ["optim.lr", "optim.schedule", "seed"]
    assert list(find_repeated_keys({"betas": [0.9, 0.95]}, OptimConf)) == ["betas"]
