"""The tables of studies show the acceptance of their runs, and each variant changes what it names."""

import argparse
import json

import pytest

from conf.entry import compose
from data.eval_prompts.prompts import load_eval_prompts
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer
from scripts.studies import eagle3
from train.config.run import TrainConf

ROUNDS = {  # accepted draft tokens of each round, prompt by prompt
    "base": [[0, 1], [2, 0, 1]],
    "two norms": [[1, 2], [4, 0, 2]],
}


@pytest.fixture
def args(tmp_path):
    options = argparse.Namespace(target=None, output=tmp_path, settings=list(ROUNDS), seeds=[0, 1])
    for setting, rounds in ROUNDS.items():
        folder = eagle3.run_folder(setting, 0, options)
        folder.mkdir()
        (folder / "accepted.json").write_text(json.dumps(rounds))
    return options


def test_the_table_has_tau_and_the_share_of_rounds_that_accept_each_depth(args):
    *_, base, norms = eagle3.render_table(args).splitlines()
    assert base.split(" | ")[1:4] == ["1.80", "1.80", ""]  # 9 tokens in 5 rounds; seed 1 is missing
    assert norms.split(" | ")[2] == "2.80"  # 14 in 5
    assert base.endswith("| 0.60 0.20 0.00 0.00 |")
    assert norms.endswith("| 0.80 0.60 0.20 0.20 |")
    assert "+1.00" in norms


def test_a_setting_without_a_run_is_left_out(args):
    args.settings = ["base", "three norms"]
    assert len(eagle3.render_table(args).splitlines()) == 3


def test_every_setting_is_a_valid_run():
    for overrides in eagle3.SETTINGS.values():
        compose("train", TrainConf, [*eagle3.BASE, "optim.steps=400", *overrides])


def test_settings_are_chosen_on_held_out_prompts_that_the_demo_does_not_report():
    tokenizer = load_tokenizer(TargetConf())
    limit = compose("train", TrainConf, []).evaluation.prompts_per_category
    chosen_on = {prompt.id for prompt in eagle3.load_unreported_prompts(tokenizer)}
    reported = {prompt.id for prompt in load_eval_prompts(tokenizer, None, limit=limit)}
    assert len(chosen_on) == len(reported) == 32
    assert not chosen_on & reported
