"""Text after KEY= reaches the command as it was typed; Hydra's own syntax stays Hydra's."""

import dataclasses
from typing import Any, get_args

import pytest

from conf.entry import compose, config_to_yaml, read_config
from conf.typed_text import PATH_KEYS
from data.config import CaptureConf, ShowConf
from data.prepare_config import PrepareConf
from infer.config import DecodePlanConf, EvalConf, GenerateConf
from infer.tree_file import TreeFileConf
from infer.tuning.config import TuneConf
from models.drafts.options import METHODS
from models.io.errors import UserError
from train.config.run import TrainConf, TrainPlanConf

PROMPTS = [
    "Hi, how are you?",
    "What's 2+2?",
    "Is 1=1?",
    "Use {x}, [y] and (z)",
    "[INST] Hi [/INST]",
    "你好,世界。",
    "Où est le café ?",
    "line one\nline two\t, tabbed",
    '"To be", he said, "or not?"',
    "C:\\dir\\",
    'a \\" b \\',
    "What does ${HOME:-x} do, and \\${y}?",
    " spaces at both ends ",
    *"3.10 2026_11_25 1e5 true -1 range(1,3)".split(),
    "# ~ ! ; & < > ^ `",
]


def compose_generate(*overrides: str) -> GenerateConf:
    return compose("generate", GenerateConf, list(overrides))


def compose_prepare(*overrides: str) -> PrepareConf:
    return compose("prepare", PrepareConf, ["mixture=one", *overrides])


def compose_train(*overrides: str) -> TrainConf:
    return compose("train", TrainConf, list(overrides))


def test_a_table_in_braces_may_have_any_names():
    conf = compose_prepare(
        "mixture.sources.rows.path=rows.jsonl",
        "mixture.sources.rows.template={enable_thinking: false}",
        "mixture.sources.rows.columns={text:prompt}",
    )
    source = conf.mixture.sources["rows"]
    assert (source.template, source.columns) == ({"enable_thinking": False}, {"text": "prompt"})
    data = compose_train("data=jsonl", "data.path=rows.jsonl", "data.template={date_string: today, tools: null}").data
    assert data.template == {"date_string": "today", "tools": None}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_read_as_typed(prompt):
    assert compose_generate(f"prompt={prompt}").prompt == prompt


def test_names_and_paths_are_read_as_typed():
    conf = compose_train(
        "run_name=2026_11_25",
        "data=jsonl",
        "data.path=date=2026-11-25/café, a(1).jsonl",
        *"data.split=train[:10%] data.column=1.50 target.revision=3.10 output_dir=1e5".split(),
    )
    assert conf.run_name == "2026_11_25"
    assert conf.data.path == "date=2026-11-25/café, a(1).jsonl"
    assert (conf.data.split, conf.data.column) == ("train[:10%]", "1.50")
    assert (conf.target.revision, conf.output_dir) == ("3.10", "1e5")


def test_text_of_a_source_and_of_a_draft_is_read_as_typed():
    source = compose_prepare(
        "mixture.sources.rows.path=a,b.jsonl",
        "++mixture.sources.rows.columns.prompt=2024",
        "mixture.sources.rows.category=it's",
    ).mixture.sources["rows"]
    assert (source.path, source.columns, source.category) == ("a,b.jsonl", {"prompt": "2024"}, "it's")
    draft = compose_train("draft=demo-lm", "draft.init_from=checkpoint", "draft.path=1.50").draft
    assert draft.path == "1.50"  # pyright: ignore[reportAttributeAccessIssue]


def test_items_of_a_list_are_read_as_typed():
    conf = compose_generate("prompt=a", "stop=[3.10, it's, café, '1, 2', \"}\", a b, true]")
    assert conf.stop == ["3.10", "it's", "café", "1, 2", "}", "a b", "true"]
    assert compose("eval", EvalConf, ["checkpoint=[1.50,a(1)]"]).checkpoint == ["1.50", "a(1)"]
    assert compose("eval", EvalConf, ["checkpoint=2026_11_25"]).checkpoint == ["2026_11_25"]


def test_quoted_values_null_and_interpolations_keep_hydras_meaning():
    assert compose_generate('prompt="a, b"', "checkpoint='x=1'").checkpoint == "x=1"
    assert compose_generate('prompt="a, b"').prompt == "a, b"
    assert compose_generate("prompt=null", "prompts=demo").prompt is None
    assert compose_generate("prompt=a", "run_name=x-${tree.depth}", "output=${run_name}").output == "x-4"
    assert compose_generate("prompt=a", "stop=[]").stop == []


def test_text_that_looks_like_a_number_is_read_back_as_text(tmp_path):
    conf = compose_train("run_name=1.50", "log.project=2026-11-25", "data.license=1_0")
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(conf))
    assert dataclasses.asdict(read_config(file, TrainConf)) == dataclasses.asdict(conf)


@pytest.mark.parametrize(
    "override", ["prompt=", "run_name=", "target.path=", "checkpoint=", "output_dir= ", "stop=[a,,b]"]
)
def test_an_empty_value_is_refused(override):
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"^{key}: must not be empty, got ' ?'; "):
        compose_generate("prompts=demo", override)


@pytest.mark.parametrize("name", ["../x", "a/../../b", "/tmp/x", "."])
def test_a_run_stays_in_its_folder(name):
    with pytest.raises(UserError, match=r"^run_name: must name a folder below output_dir, .*, got "):
        compose_generate("prompt=a", f"run_name={name}")


def test_home_folders_are_expanded_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    conf = compose_generate(
        "checkpoint=~/ck",
        "prompts=~/p.jsonl",
        "target.path=~/m",
        "output_dir=~/out",
        "tree.file=~/tree.json",
        "device.cache_dir=~/cache",
    )
    assert (conf.checkpoint, conf.prompts) == ("/home/me/ck", "/home/me/p.jsonl")
    assert (conf.target.path, conf.tree.file) == ("/home/me/m", "/home/me/tree.json")
    assert (conf.answers_file, conf.device.cache_dir) == ("/home/me/out/generate/answers.jsonl", "/home/me/cache")
    assert compose("eval", EvalConf, ["checkpoint=[~/a,~/b]"]).checkpoint == ["/home/me/a", "/home/me/b"]
    mixture = compose_prepare("mixture.sources.rows.path=~/rows", "mixture.exclude=[~/held]").mixture
    assert (mixture.sources["rows"].path, mixture.exclude) == ("/home/me/rows", ["/home/me/held"])
    assert compose_generate("prompt=~/m is home").prompt == "~/m is home"


TEXT_KEYS = set(
    (
        "api_key_env category column entity language license model project prompt revision run_name split subset url "
        "visible_cores"
    ).split()
)


def list_text_keys(schema: Any) -> set[str]:
    keys = set()
    for field in dataclasses.fields(schema):
        if field.type in (str, str | None, list[str]):
            keys.add(field.name)
        kinds = [field.type, *get_args(field.type)]
        keys.update(*(list_text_keys(kind) for kind in kinds if dataclasses.is_dataclass(kind)))
    return keys


def test_every_text_key_is_listed_as_a_path_or_as_other_text():
    schemas = (
        TrainPlanConf,
        PrepareConf,
        ShowConf,
        CaptureConf,
        EvalConf,
        TuneConf,
        GenerateConf,
        DecodePlanConf,
        TreeFileConf,
        *METHODS.values(),
    )
    keys = set().union(*map(list_text_keys, schemas)) - {"stop"}
    assert keys | {"checkpoint"} == TEXT_KEYS | PATH_KEYS
