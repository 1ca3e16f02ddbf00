"""Every YAML that ships composes into valid dataclasses, and choices win in the promised order."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from conf.entry import CONF_DIR, compose, config_to_yaml, read_config
from data.prepare_config import PrepareConf
from infer.config import EvalConf
from models.drafts.options import METHODS
from models.losses.config import LossName
from models.trees.config import TreeConf
from models.trees.tree import TreeKind
from train.config.run import TrainConf, TrainPlanConf

GROUPS = "target data loss tree optim recipe device parallel machine log experiment mixture evaluation answers".split()
ELSEWHERE = {  # groups that training does not have
    "machine": ("train_plan", TrainPlanConf),
    "mixture": ("prepare", PrepareConf),
    "answers": ("prepare", PrepareConf),
}
NEEDS = {
    "data=captured": ["data.path=store"],
    "data=jsonl": ["data.path=rows.jsonl"],
    "answers=endpoint": ["answers.url=http://localhost:8000/v1"],
    "data=prepared": ["data.path=outputs/prepare/demo"],
    "mixture=one": ["mixture.sources.rows.path=rows.jsonl"],
}  # keys without a sensible default
YAMLS = {group: sorted((Path(CONF_DIR) / group).glob("*.yaml")) for group in GROUPS}
DRAFTS = list(yaml.safe_load((Path(CONF_DIR) / "drafts.yaml").read_text()))
FILES = [f"{group}={path.stem}" for group, paths in YAMLS.items() for path in paths]
OPTIONS = [*FILES, *(f"draft={name}" for name in DRAFTS)]


def compose_train(*overrides: str) -> TrainConf:
    return compose("train", TrainConf, list(overrides))


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option_composes_and_validates(option):
    name, schema = ELSEWHERE.get(option.partition("=")[0], ("train", TrainConf))
    conf = compose(name, schema, [option, *NEEDS.get(option, [])])
    assert type(conf) is schema
    assert not hasattr(conf, "draft") or type(conf.draft) in METHODS.values()


def test_every_loss_can_be_chosen():
    assert {name.value for name in LossName} <= {path.stem for path in YAMLS["loss"]}


@pytest.mark.parametrize("draft", [draft for draft in DRAFTS if draft.endswith("eagle3")])
def test_few_answers_replaces_optimizer_and_loss_of_every_eagle3_layer_and_typed_keys_win(draft):
    conf = compose_train(f"draft={draft}", "recipe=few_answers", "optim.muon_lr=0.5")
    assert (conf.optim.name.value, conf.optim.muon_lr, conf.loss.name.value) == ("muon", 0.5, "forward_kl")


def test_a_sequence_takes_the_recipe_for_few_answers():
    conf = compose_train("experiment=qwen3-8b-eagle3", "recipe=few_answers")
    published = compose_train("experiment=qwen3-8b-eagle3")
    assert conf.draft == dataclasses.replace(published.draft, ttt_steps=4, dropout=0.1)
    assert (conf.data, conf.run_name) == (published.data, published.run_name)
    assert conf.loss.on_prompts
    assert not published.loss.on_prompts


@pytest.fixture(scope="module")
def mixed_tree():
    return compose_train("tree=mixed").tree


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_real_draft_is_tuned_for_its_report_and_a_demo_keeps_its_tree(draft, mixed_tree):
    conf = compose_train(f"draft={draft}")
    assert conf.tune == ("demo" not in draft)
    assert conf.tree == mixed_tree


def test_the_command_line_chooses_the_tree_of_a_draft():
    for overrides in (["draft=qwen3-8b-eagle3", "tree=chain"], ["tree=chain", "draft=demo"]):
        assert compose_train(*overrides).tree == TreeConf(kind=TreeKind.chain, depth=4)
    assert compose_train("draft=demo", "tune=true").tune


def test_every_group_has_options():
    assert {option.partition("=")[0] for option in FILES} == set(GROUPS)


def test_every_yaml_belongs_to_a_group_or_a_command():
    files = {str(p.relative_to(CONF_DIR)) for p in Path(CONF_DIR).rglob("*.yaml")}
    groups = {option.replace("=", "/") + ".yaml" for option in FILES}
    commands = (
        "training train train_plan train_warmup infer_plan eval eval_warmup generate tune "
        "tree_file prepare capture show device_check command"
    )
    registered = {"drafts.yaml", "sequences.yaml"}  # options of draft and of experiment
    hydra = {"hydra/job_logging/quiet.yaml"}  # settings of Hydra itself
    assert files == groups | registered | hydra | {f"{name}.yaml" for name in commands.split()}


def test_every_trainable_method_has_a_draft():
    shipped = {type(compose_train(f"draft={name}").draft) for name in DRAFTS}
    assert shipped == set(METHODS.values())


def test_evaluation_composes_with_several_checkpoints():
    assert type(compose("eval", EvalConf, ["checkpoint=[a,b]", "tree=chain"])) is EvalConf


def test_the_defaults_need_no_network():
    conf = compose_train()
    assert conf.target.name == "demo"
    assert conf.data.source.value == "demo"
    assert conf.log.wandb.value == "off"


def test_a_draft_chooses_its_target_and_the_command_line_wins():
    assert compose_train("draft=qwen3-8b-eagle3").target.name == "Qwen/Qwen3-8B"
    assert compose_train("draft=qwen3-8b-eagle3", "target=demo").target.name == "demo"
    assert compose_train("target=demo", "draft=qwen3-8b-eagle3").target.name == "demo"
    assert compose_train("draft=qwen3-8b-eagle3", "target.name=/models/mine").target.name == "/models/mine"


def test_an_experiment_wins_over_the_defaults_and_the_command_line_over_it():
    experiment = "experiment=demo-long"
    assert (compose_train().optim.steps, compose_train(experiment).optim.steps) == (300, 1200)
    assert compose_train(experiment, "optim.steps=2").optim.steps == 2
    assert compose_train(experiment, "evaluation=quick").evaluation.batch_sizes == []
    assert compose_train(experiment, "draft=llama-3.1-8b-eagle3").target.name.startswith("meta-llama/")


def test_the_recipe_of_one_draft_serves_another():
    medusa = compose_train("draft=qwen3-8b-medusa")
    conf = compose_train("draft=qwen3-8b-eagle3", "optim=qwen3-8b-medusa", "loss=qwen3-8b-medusa")
    assert (conf.optim, conf.loss) == (medusa.optim, medusa.loss)
    assert compose_train("draft=qwen3-8b-medusa", "optim=muon").optim.name.value == "muon"


def test_a_run_is_named_after_its_draft():
    assert compose_train().run_name == "demo"
    assert compose_train("draft=qwen3-8b-eagle3").run_name == "qwen3-8b-eagle3"
    assert compose_train("run_name=mine").run_name == "mine"


def test_the_configuration_of_a_run_is_read_back_equal(tmp_path):
    conf = compose_train("draft=qwen3-8b-eagle3", "tree=static", "draft.layers=[1,2]", "optim.lr=3e-5")
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(conf))
    assert dataclasses.asdict(read_config(file, TrainConf)) == dataclasses.asdict(conf)
    assert type(read_config(file, TrainConf).draft) is type(conf.draft)


@pytest.mark.parametrize(
    ("command", "warmup", "schema"), [("train", "train_warmup", TrainConf), ("eval", "eval_warmup", EvalConf)]
)
def test_a_warmup_takes_the_overrides_of_its_run(command, warmup, schema):
    overrides = ["tree=chain", "device=cpu"]
    assert compose(warmup, schema, overrides).tree == compose(command, schema, overrides).tree
