"""Ten steps of the demo, and its answers, are right on a device, or fail with a remedy."""

from pathlib import Path

import pytest

from models.device.config import DeviceConf, DeviceName
from models.device.device import Device
from tests.support.models.tiny import CPU
from train.device import training
from train.device.checks import Check, CheckContext, Outcome, run_check


class ScalingDevice(Device):
    """A device whose losses are 1 % too large."""

    def compile_part(self, function, **options):
        def scaled(*args):
            loss, *others = function(*args)
            return 1.01 * loss, *others

        return scaled if function.__name__ == "evaluate_chunk" else function


class ForgetfulDevice(Device):
    """A device whose rounds always write token 1."""

    def compile(self, function, **options):
        if function.__name__ != "fused":
            return function

        def forget(program, state):
            state, output = function(program, state)
            output.ids_and_count[:, :-1] = 1
            return state, output

        return forget


def run_last(folder: Path, device: Device, **options) -> Outcome:
    """Run the last check of the stage: of the draft, or of the answers if there is none."""
    context = CheckContext(device=device, folder=folder, conf=DeviceConf(name=DeviceName.cpu))
    *_, check = training.list_checks(context, **options)
    assert isinstance(check, Check)
    return run_check("training", check)


@pytest.mark.system
@pytest.mark.parametrize(
    "draft", ["demo", *(pytest.param(name, marks=pytest.mark.slow) for name in training.DRAFTS[1:])]
)
def test_a_device_that_computes_as_the_cpu_passes(draft, tmp_path):
    outcome = run_last(tmp_path, CPU, drafts=[draft])
    assert outcome.result == "PASS", outcome.detail
    assert outcome.detail.startswith("losses differ by 0.0e+00 at most")
    assert "tokens/s" in outcome.detail


@pytest.mark.slow
@pytest.mark.system
def test_a_loss_that_is_too_large_fails_with_the_remedy(tmp_path):
    outcome = run_last(tmp_path, ScalingDevice(**vars(CPU)), drafts=["demo"])
    assert outcome.result == "FAIL", outcome.detail
    assert outcome.detail.startswith("losses differ by 1.0e-02")
    assert outcome.remedy == training.REMEDY


@pytest.mark.system
def test_answers_that_are_those_of_transformers_pass(tmp_path):
    outcome = run_last(tmp_path, CPU, drafts=[])
    assert outcome.result == "PASS", outcome.detail
    assert outcome.detail.startswith("4 of 4 answers")


@pytest.mark.slow
@pytest.mark.system
def test_other_answers_fail_with_the_remedy(tmp_path):
    outcome = run_last(tmp_path, ForgetfulDevice(**vars(CPU)), drafts=[])
    assert outcome.result == "FAIL", outcome.detail
    assert outcome.detail.startswith("0 of 4 answers")
    assert outcome.remedy == training.REMEDY


def test_the_rate_leaves_the_first_step_out():
    lines = [
        {"train/tokens": tokens, "train/tokens_per_s": rate}
        for tokens, rate in ((10.0, 0.1), (30.0, 10.0), (60.0, 10.0))
    ]
    assert training.count_tokens_per_s(lines) == pytest.approx(10)
