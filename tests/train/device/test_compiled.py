"""Compiled training has the gradients of eager training."""

import pytest

from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from train.device.checks import Bench
from train.device.functions import compare_training


@pytest.mark.system
@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("method", ["demo", "demo-lm", "demo-medusa2"])
def test_a_compiled_loss_has_the_gradient_of_an_eager_one(method, tmp_path):
    device = open_device(DeviceConf(name=DeviceName.cpu))
    compare_training(method, device, Bench(device=device, folder=tmp_path).reference)
