"""Rounds that are recorded and replayed emit what plain rounds emit; a CPU stands in for CUDA's graphs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from infer.engine.decode import Decoder
from models.device.config import DeviceConf, DeviceName
from models.device.device import Device
from models.device.opening import open_device
from models.io.errors import UserError
from models.trees.sampling_config import SamplingConf
from tests.infer.engine.test_batches_ragged import BATCH, RAGGED, SLOTS, build_decoder, decode_together, requests
from tests.support.decoding.agreeing import METHODS

__all__ = ["requests"]  # a fixture
pytestmark = pytest.mark.no_shapes


class ReplayingDevice(Device):
    """A CPU that runs a recorded function again, always into the tensors of its first run.

    Like a graph, it is given no arguments: what a round reads must be in the recording's own tensors.
    """

    launches: int = 0

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        first: list[Any] = []

        def launch() -> Any:
            self.launches += 1
            results = function()
            first.append(results)
            for kept, new in zip(tree_leaves(first[0]), tree_leaves(results), strict=True):
                if isinstance(kept, Tensor) and kept is not new:
                    kept.copy_(new)
            return first[0]

        return launch


@pytest.fixture
def replaying(small):
    """Return `small` on a device that records rounds."""
    target = copy.copy(small)
    target.device = ReplayingDevice(
        name="cuda", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=False, records_rounds=True
    )
    return target


@pytest.mark.parametrize(("rule", "shape"), RAGGED)
def test_replayed_rounds_emit_what_plain_rounds_emit(small, replaying, drafts, requests, rule, shape):
    """Prompts that join, and a second call, bring states that are not the recording's own."""
    draft = drafts[METHODS[RAGGED.index((rule, shape)) % len(METHODS)]]
    plain, recorded = (build_decoder(target, draft, rule, shape, BATCH) for target in (small, replaying))
    expected = decode_together(plain, requests)
    assert decode_together(recorded, requests) == expected == decode_together(recorded, requests, backwards=True)
    assert len(recorded.session._fused.recordings) == 1
    assert replaying.device.launches > 10


def test_logits_of_replayed_rounds_are_those_of_plain_rounds(small, replaying):
    sampling, ids = SamplingConf(temperature=1.0, seed=4), [5, 3, 9, 1, 2, 8]
    plain, recorded = (
        [torch.stack(pair) for pair in Decoder(target, sampling=sampling, slots=SLOTS).force_tokens([3, 4], 0, ids)]
        for target in (small, replaying)
    )
    torch.testing.assert_close(recorded, plain)
    assert not torch.equal(plain[-2], plain[-1])


def test_a_device_without_cuda_refuses_its_graphs():
    with pytest.raises(UserError, match=r"device\.cuda_graphs: needs device=cuda, got cpu; leave it out"):
        open_device(DeviceConf(name=DeviceName.cpu, cuda_graphs=True))
