"""A round reads one tensor from the device, whatever the tree, also if reads below Python count."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.engine.decode import Decoder
from models.trees.sampling_config import SamplingConf
from tests.support.runs.compiled_run import SHAPES, counted_reads


class Scalars(TorchDispatchMode):
    """Count reads below Python, which `if tensor:` or `int(tensor)` would cause."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_reads_one_tensor_a_round(target, learned, shape, temperature):
    draft, texts = learned
    sampling = SamplingConf(temperature=temperature)
    decoder = Decoder(target, draft, SHAPES[shape], sampling=sampling, slots=64, batch=2)
    with counted_reads() as reads, Scalars() as scalars:
        generations = decoder.decode([texts[0][:5], texts[1][:9]], row_ids=[0, 1], max_new_tokens=20)
    assert scalars.count == 0
    assert reads == ["tolist"] * (1 + max(len(row.round_s) for row in generations))
