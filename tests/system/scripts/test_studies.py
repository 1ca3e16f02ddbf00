"""The tables of studies show the acceptance of their runs, and each variant changes what it names."""

import argparse
import json

import pytest

from conf.entry import compose
from data.demo.prompts import training_prompts
from data.eval_prompts.prompts import load_calibration_prompts, load_eval_prompts
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer
from scripts.studies import eagle3
from scripts.studies.chain_rounds import NUM_UNREAD, load_unread_prompts
from train.config.run import TrainConf

ROUNDS = {  # accepted draft tokens of each round, prompt by prompt
    "ours": [[0, 1], [2, 0, 1]],
    "ours, dropout 0": [[1, 2], [4, 0, 2]],
}


@pytest.fixture
def args(tmp_path):
    options = argparse.Namespace(target=None, output=tmp_path, settings=list(ROUNDS), seeds=[0, 1], steps=400)
    for setting, rounds in ROUNDS.items():
        folder = eagle3.run_folder(setting, 0, options)
        folder.mkdir()
        (folder / "accepted.json").write_text(json.dumps(rounds))
    return options


def test_the_table_has_tau_and_the_share_of_rounds_that_accept_each_depth(args):
    ours, other = eagle3.build_table(args).rows
    assert ours == ["ours", "1.80", "1.80", "", "0.60 0.20 0.00 0.00"]  # 9 tokens in 5 rounds; seed 1 is missing
    assert other[2] == "2.80"  # 14 in 5
    assert other[3].startswith("+1.00 [")
    assert other[4] == "0.80 0.60 0.20 0.20"


def test_a_setting_without_a_run_is_left_out(args):
    args.settings = ["ours", "ours, three norms"]
    assert len(eagle3.build_table(args).rows) == 1


def test_every_setting_is_a_valid_run():
    confs = [
        compose("train", TrainConf, [*eagle3.BASE, "optim.steps=400", *overrides])
        for overrides in eagle3.SETTINGS.values()
    ]
    assert len(set(map(str, confs))) == len(confs) <= 20


def test_settings_are_chosen_on_prompts_that_no_run_reads_and_no_report_judges():
    tokenizer = load_tokenizer(TargetConf())
    chosen_on = [prompt.ids for prompt in eagle3.load_study_prompts(tokenizer)]
    judged = [prompt.ids for prompt in load_eval_prompts(tokenizer, None, limit=None)]
    read = [tokenizer(prompt.text)["input_ids"] for seed in (0, 1, 2) for prompt in training_prompts(2048, seed)]
    assert len(chosen_on) == NUM_UNREAD
    assert not any(ids in judged or ids in read for ids in chosen_on)


def test_prompts_that_begin_a_text_that_was_read_are_left_out():
    tokenizer = load_tokenizer(TargetConf())
    candidates = [prompt.ids for prompt in load_calibration_prompts(tokenizer, "demo", 4 * NUM_UNREAD)]
    unread = load_unread_prompts(tokenizer, None, [[*ids, 1, 2] for ids in candidates[::2]])
    assert [prompt.ids for prompt in unread] == candidates[1::2][:NUM_UNREAD]
    with pytest.raises(UserError, match=r"^--calibration: must have 64 prompts that are neither judged nor trained on"):
        load_unread_prompts(tokenizer, None, candidates[NUM_UNREAD - 1 :])
