"""Samples of XLA's CPU device have the target's distribution, and are those of the CPU, as the noise has its bits."""

import json

import pytest
import torch

from models.trees.sampling_config import SamplingConf
from tests.support.decoding.samples import LEAST, compute_joint_distribution, compute_logits_behind, compute_p_value
from tests.xla.sampling_run import TRIALS
from tests.xla.test_xla import run_program


@pytest.fixture(scope="module")
def behind(small):
    return compute_logits_behind(small)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return the samples of each device by trial."""
    folder, by_device = tmp_path_factory.mktemp("samples"), {}
    for device in ("cpu", "xla"):
        run_program("sampling_run.py", device, [device, str(folder / device)])
        by_device[device] = json.loads((folder / device).read_text())
    return by_device


@pytest.mark.parametrize(("rule", "shape", "temperature"), TRIALS)
def test_samples_have_the_targets_distribution(samples, behind, rule, shape, temperature):
    sample = samples["xla"][f"{rule}, {shape}, {temperature}"]
    joint = compute_joint_distribution(behind, SamplingConf(temperature=temperature, seed=11))
    values = [compute_p_value(torch.tensor(sample["ids"]), joint, positions) for positions in ([1, 2], [3, 4], [1, 4])]
    assert 0.1 < sample["accepted"] < 0.97
    assert min(values) > LEAST, values


@pytest.mark.parametrize(("rule", "shape", "temperature"), TRIALS)
def test_rows_are_those_of_the_cpu(samples, rule, shape, temperature):
    """A row may differ where rounding decides between two tokens, or between a coin and a ratio."""
    ours, theirs = (samples[device][f"{rule}, {shape}, {temperature}"]["ids"] for device in ("xla", "cpu"))
    equal = [our_row == their_row for our_row, their_row in zip(ours, theirs, strict=True)]
    assert sum(equal) >= 0.995 * len(equal)
