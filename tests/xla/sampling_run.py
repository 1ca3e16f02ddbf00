"""Sample five tokens of five hundred rows on one device: sampling_run.py xla|cpu FILE, by test_xla_sampling.py.

FILE becomes {"rule, shape, temperature": {"ids": [...], "accepted": the share of rounds that accepted a token}}.
"""

import json
import sys
from pathlib import Path

import torch

from models.device.config import DeviceConf, DeviceName, Precision
from models.device.opening import open_device
from models.trees.sampling_config import SamplingConf
from tests.support.decoding.agreeing import build_small_target, noised
from tests.support.decoding.samples import sample_tokens

ROWS = 500
TRIALS = [("rejection", "dynamic", 0.7), ("coupled", "static", 1.2)]

if __name__ == "__main__":
    name, file = sys.argv[1:]
    torch.set_num_threads(1)
    device = open_device(DeviceConf(name=DeviceName[name], precision=Precision.float32, compile=False))
    target = build_small_target()
    draft = noised(target)
    for model in (target.model, draft):
        model.to(device.torch_device)
    target.device = device
    results = {}
    for rule, shape, temperature in TRIALS:
        sampling = SamplingConf(temperature=temperature, seed=11)
        ids, accepted = sample_tokens(target, draft, rule, shape, sampling, ROWS)
        results[f"{rule}, {shape}, {temperature}"] = {"ids": ids.tolist(), "accepted": accepted}
    Path(file).write_text(json.dumps(results))
