"""Stages are chosen by their names, and a mistake is answered before anything runs."""

from importlib import import_module

import pytest

from conf.entry import compose
from models.io.errors import UserError
from train.config.device_check import STAGES, DeviceCheckConf
from train.device.__main__ import main


def test_all_stages_run_unless_some_are_chosen():
    assert compose("device_check", DeviceCheckConf, []).stages == list(STAGES)
    assert compose("device_check", DeviceCheckConf, ["stages=[operators,place]"]).stages == ["operators", "place"]


def test_each_stage_is_a_module_that_lists_checks():
    for stage in STAGES:
        assert callable(import_module(f"train.device.{stage}").list_checks)


def test_a_stage_has_more_than_no_time():
    with pytest.raises(UserError, match="minutes: "):
        DeviceCheckConf(minutes=0.0)


def test_the_command_answers_an_unknown_stage_with_all_names(read_refusal):
    assert read_refusal(main, "stages=[place,operator]") == (
        "error: stages: must be of place, product, operators, functions, processes, sizes, training, got operator; "
        "choose among them"
    )
