"""A round reads one tensor from the device, whatever the tree, also if reads below Python count."""

import pytest
import torch

from infer.engine.decode import Decoder
from models.trees.sampling_config import SamplingConf
from tests.support.models.watching import WatchedOperators
from tests.support.runs.compiled_run import SHAPES, counted_reads


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_reads_one_tensor_a_round(target, learned, shape, temperature):
    draft, texts = learned
    sampling = SamplingConf(temperature=temperature)
    decoder = Decoder(target, draft, SHAPES[shape], sampling=sampling, slots=64, batch=2)
    operators = []
    with counted_reads() as reads, WatchedOperators(lambda operator, *_: operators.append(operator)):
        generations = decoder.decode([texts[0][:5], texts[1][:9]], row_ids=[0, 1], max_new_tokens=20)
    # Reads below Python, which `if tensor:` or `int(tensor)` would cause.
    assert torch.ops.aten._local_scalar_dense.default not in operators
    assert reads == ["tolist"] * (1 + max(len(row.round_s) for row in generations))
