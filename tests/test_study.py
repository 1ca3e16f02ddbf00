"""The study's table says what its runs accepted."""

import argparse
import json

import pytest

from scripts import study_eagle3

ROUNDS = {  # accepted draft tokens of each round, prompt by prompt
    "base": [[0, 1], [2, 0, 1]],
    "two norms": [[1, 2], [4, 0, 2]],
}


@pytest.fixture
def args(tmp_path):
    chosen = argparse.Namespace(output=tmp_path, settings=list(ROUNDS), seeds=[0, 1])
    for setting, rounds in ROUNDS.items():
        folder = study_eagle3.run_folder(setting, 0, chosen)
        folder.mkdir()
        (folder / "accepted.json").write_text(json.dumps(rounds))
    return chosen


def test_the_table_has_tau_and_the_shares_of_rounds_that_got_that_deep(args):
    *_, base, norms = study_eagle3.render_table(args).splitlines()
    assert base.split(" | ")[1:4] == ["1.80", "1.80", ""]  # 9 tokens in 5 rounds; seed 1 is missing
    assert norms.split(" | ")[2] == "2.80"  # 14 in 5
    assert base.endswith("| 0.60 0.20 0.00 0.00 |")
    assert norms.endswith("| 0.80 0.60 0.20 0.20 |")
    assert "+1.00" in norms


def test_a_setting_without_a_run_is_left_out(args):
    args.settings = ["base", "output"]
    assert len(study_eagle3.render_table(args).splitlines()) == 3


def test_every_setting_is_a_valid_run():
    from conf.entry import compose
    from train.config import TrainConf

    for overrides in study_eagle3.SETTINGS.values():
        compose("train", TrainConf, [*study_eagle3.BASE, "optim.steps=400", *overrides])
