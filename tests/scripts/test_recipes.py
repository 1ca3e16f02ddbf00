"""docs/recipes.md lists the values of the configurations, and why they differ from published ones."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import conf
from conf.entry import compose
from scripts.benchmarks.tables import replaced
from scripts.recipes import PAGE, list_sources, load_data, our_value, render_all, value_sources
from train.config.run import TrainConf

DATA, RENDERED = load_data(), render_all()
RECIPES = DATA["recipes"]
DRAFTS = [(recipe, draft) for recipe in RECIPES for draft in recipe["drafts"]]
MEDUSA_DRAFTS = next(recipe["drafts"] for recipe in RECIPES if recipe["name"] == "Medusa-1")
ALWAYS_LISTED = set(
    (
        "optim.name optim.lr optim.betas optim.weight_decay optim.schedule optim.warmup_ratio optim.max_grad_norm "
        "optim.epochs optim.rows_per_step data.row_length data.path loss.name loss.step_decay loss.reduction"
    ).split()
)


@pytest.mark.parametrize(("recipe", "draft"), DRAFTS, ids=[f"{recipe['name']}-{draft}" for recipe, draft in DRAFTS])
def test_a_draft_has_the_values_of_its_table(recipe, draft):
    overrides = [f"draft={draft}", f"recipe={recipe.get('recipe', 'published')}"]
    config = OmegaConf.structured(compose("train", TrainConf, overrides))
    plain = OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True))
    values = {value["key"]: our_value(value) for value in recipe["values"] if "key" in value}
    assert {key: OmegaConf.select(plain, key) for key in values} == values
    assert set(values) >= ALWAYS_LISTED
    assert "a row" in [value.get("what") for value in recipe["values"]]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["name"])
def test_every_difference_has_a_reason_and_every_published_value_a_source(recipe):
    for value in recipe["values"]:
        assert ("ours" in value) == ("why" in value), value
        assert "ours" not in value or value["ours"] != value["published"], value
        assert value["published"] == "none" or value_sources(value, recipe), value


@pytest.mark.parametrize("name", RENDERED)
def test_the_page_has_every_digit_of_the_data(name):
    page = PAGE.read_text()
    assert replaced(page, name, RENDERED[name]) == page


def test_the_page_has_no_table_of_its_own():
    rest = PAGE.read_text()
    for name in RENDERED:
        rest = replaced(rest, name, "")
    assert not [line for line in rest.splitlines() if line.startswith("|")]


def test_every_published_cell_has_a_source_and_every_source_is_cited():
    rows = [row[table["own_columns"] :] for table in DATA["tables"] for row in table["rows"]]
    cells = [cell for row in rows for cell in row if cell != "not stated"]
    assert all(isinstance(cell, list) and len(cell) > 1 for cell in cells)
    cited = {name for cell in cells for name in cell[1:]}
    values = [(value, recipe) for recipe in RECIPES for value in recipe["values"]]
    cited |= {name for value in values for name in value_sources(*value)}
    assert cited == set(list_sources(DATA))


def test_every_file_is_cited_at_a_commit():
    commits = [group["commit"] for group in DATA["sources"] if "repository" in group]
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)


def test_every_draft_of_a_real_target_has_a_recipe():
    drafts = yaml.safe_load((Path(conf.__file__).parent / "drafts.yaml").read_text())
    listed = {draft for _, draft in DRAFTS}
    assert {draft for draft in drafts if not draft.startswith("demo")} == listed


def test_the_heads_of_a_large_target_share_its_vocabulary_head():
    own = {draft: compose("train", TrainConf, [f"draft={draft}"]).draft.separate_lm_heads for draft in MEDUSA_DRAFTS}
    assert own == {"qwen3-8b-medusa": True, "qwen3-32b-medusa": False}
