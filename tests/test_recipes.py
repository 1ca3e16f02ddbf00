"""docs/recipes.md lists what the configurations hold, and why they differ from published values."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from conf.entry import compose
from scripts.bench_tables import replaced
from scripts.recipes import PAGE, load_recipes, our_value, render_recipe
from train.config.run import TrainConf

RECIPES = load_recipes()["recipes"]
DRAFTS = [(recipe, draft) for recipe in RECIPES for draft in recipe["drafts"]]
ALWAYS_LISTED = {
    "optim.name", "optim.lr", "optim.betas", "optim.weight_decay", "optim.schedule",
    "optim.warmup_ratio", "optim.max_grad_norm", "optim.epochs", "optim.rows_per_step",
    "data.row_length", "loss.name", "loss.step_decay", "loss.reduction",
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "draft"), DRAFTS, ids=[f"{recipe['name']}-{draft}" for recipe, draft in DRAFTS]
)
def test_a_draft_has_the_values_of_its_table(recipe, draft):
    config = OmegaConf.structured(compose("train", TrainConf, [f"draft={draft}"]))
    plain = OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True))
    values = {value["key"]: our_value(value) for value in recipe["values"]}
    assert {key: OmegaConf.select(plain, key) for key in values} == values
    assert set(values) >= ALWAYS_LISTED


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["name"])
def test_every_difference_has_a_reason_and_the_page_is_up_to_date(recipe):
    for value in recipe["values"]:
        assert ("ours" in value) == ("why" in value), value["key"]
        assert value.get("ours") != value["published"] or "ours" not in value, value["key"]
    page = PAGE.read_text()
    assert replaced(page, recipe["name"], render_recipe(recipe)) == page


def test_every_draft_of_a_real_target_has_a_recipe():
    drafts = {file.stem for file in (Path(conf.__file__).parent / "draft").glob("*.yaml")}
    listed = {draft for _, draft in DRAFTS}
    assert {draft for draft in drafts if not draft.startswith("demo")} == listed
