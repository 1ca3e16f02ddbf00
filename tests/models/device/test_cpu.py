"""Packed weights give the products of the weights themselves, and only frozen layers have them."""

import copy
import gc
import platform
import resource
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from models.device import cpu
from models.device.cpu import CpuDevice, can_pack, count_packed_bytes, pack_linear_layers
from models.device.opening import can_compile
from tests.support.models.watching import WatchedOperators

SIZE = 320  # squared: more than the fewest weights that are packed


def frozen_layer(dtype=torch.float32, *, bias=True):
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE + 32, bias=bias).to(dtype).requires_grad_(False)


class Projections(nn.Module):
    """Three layers that read the same input, two of them too small to be packed alone, and one of another input."""

    def __init__(self, biases=(True, True, True)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(SIZE, outputs, bias=bias) for outputs, bias in zip((SIZE, 64, 64), biases, strict=True)
        )
        self.o_proj = nn.Linear(SIZE, SIZE)
        self.requires_grad_(False)

    def forward(self, hidden):
        return self.o_proj(self.q_proj(hidden)), self.k_proj(hidden), self.v_proj(hidden)


def cpu_device(*, compiles):
    return CpuDevice(name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=compiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 5), (2, 40), (3, 2, 1)])
@torch.no_grad()
def test_products_are_those_of_the_weights(dtype, bias, shape):
    if not can_pack(dtype):
        pytest.skip(f"this CPU does not pack {dtype}")
    layer = frozen_layer(dtype, bias=bias)
    hidden = torch.randn(*shape, SIZE, dtype=dtype)
    expected = layer(hidden)
    pack_linear_layers(layer)
    assert_close(layer(hidden), expected)


@pytest.mark.no_shapes  # compiled calls do not pass through the checks
@torch.no_grad()
def test_layers_of_a_compiled_function_have_their_own_weights(fresh_compiler):
    layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3)).requires_grad_(False)

    def run(hidden):
        for layer in layers:
            hidden = layer(hidden).tanh()
        return hidden

    hidden = torch.randn(2, SIZE)
    expected = run(hidden)
    pack_linear_layers(layers)
    assert_close(torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")(hidden), expected)


@pytest.mark.no_shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
@torch.no_grad()
def test_layers_of_one_input_keep_their_own_products(dtype, biases, fresh_compiler):
    if not can_pack(dtype):
        pytest.skip(f"this CPU does not pack {dtype}")
    layers, hidden = Projections(biases).to(dtype), torch.randn(2, 3, SIZE, dtype=dtype)
    expected = layers(hidden)
    pack_linear_layers(layers)
    for run in (layers, torch.compile(layers, fullgraph=True, dynamic=False, backend="aot_eager")):
        assert_close(run(hidden), expected)


@pytest.mark.system
@pytest.mark.no_shapes
@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@torch.no_grad()
def test_a_graph_multiplies_once_by_the_layers_of_one_input(fresh_compiler):
    device = cpu_device(compiles=True)
    layers, hidden = nn.ModuleList(Projections() for _ in range(3)), torch.randn(2, SIZE)
    run_layer = device.compile_region(lambda layer, hidden: layer(hidden))

    def run(hidden):
        products = []
        for layer in layers:
            hidden, *others = run_layer(layer, hidden)
            products += others
        return [hidden, *products]

    expected = run(hidden)
    device.pack_weights(layers)
    compiled = device.compile(run)
    compiled(hidden)
    with torch.profiler.profile() as profile:
        assert_close(compiled(hidden), expected)
    calls = [event.count for event in profile.key_averages() if event.key == "draftsmith::packed_linear"]
    assert calls == [3 * 2]  # by q_proj, k_proj and v_proj, and by o_proj


@torch.no_grad()
def test_outside_graphs_layers_of_one_input_compute_their_own_outputs_alone():
    layers, widths = Projections(), set()
    pack_linear_layers(layers)
    with WatchedOperators(lambda operator, args, output: widths.add(output.shape[-1])):
        layers.k_proj(torch.randn(2, SIZE))
    assert widths == {SIZE, 64}  # of the weights and of the product


@torch.no_grad()
def test_layers_of_one_input_share_a_copy_of_the_bytes_that_are_counted():
    before, layers = set(cpu._packed_layers), Projections()
    pack_linear_layers(layers)
    copies = [weight for key, (weight, _) in cpu._packed_layers.items() if key not in before]
    assert len(copies) == 2
    assert sum(copy.nbytes for copy in copies) == count_packed_bytes(layers)


@torch.no_grad()
def test_layers_of_one_input_are_packed_if_all_are_frozen():
    layers = Projections()
    layers.q_proj.bias.requires_grad_(True)
    pack_linear_layers(layers)
    assert [hasattr(layer, "packed_key") for layer in layers.children()] == [False, False, False, True]


@pytest.mark.no_shapes
@torch.no_grad()
def test_two_models_of_one_graph_multiply_by_their_own_weights(fresh_compiler):
    """As a trained and an untrained draft do."""
    compiled = torch.compile(lambda layer, hidden: layer(hidden), fullgraph=True, dynamic=False, backend="aot_eager")
    layers, hidden = [nn.Linear(SIZE, SIZE).requires_grad_(False) for _ in range(2)], torch.randn(2, SIZE)
    expected = [layer(hidden) for layer in layers]
    for layer in layers:
        pack_linear_layers(layer)
    before = CpuDevice.count_graphs()
    for layer, product in zip(layers, expected, strict=True):
        assert_close(compiled(layer, hidden), product)
    assert CpuDevice.count_graphs() == before + 1


def test_a_packed_layer_passes_gradients_on():
    layer, plain = frozen_layer(), frozen_layer()
    pack_linear_layers(layer)
    ours, theirs = (torch.ones(2, SIZE, requires_grad=True) for _ in range(2))
    layer(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_layers_that_learn_or_are_small_stay_as_they_are():
    layers = [frozen_layer().requires_grad_(True), nn.Linear(SIZE, 8).requires_grad_(False)]
    pack_linear_layers(nn.ModuleList(layers))
    assert not any(hasattr(layer, "packed_key") for layer in layers)


def test_a_layer_is_packed_once_and_its_packed_weights_go_with_it():
    gc.collect()
    before = len(cpu._packed_layers)
    layer = frozen_layer()
    for _ in range(2):
        pack_linear_layers(layer)
    assert len(cpu._packed_layers) == before + 1
    del layer
    gc.collect()
    assert len(cpu._packed_layers) == before


@torch.no_grad()
def test_a_copy_of_a_packed_layer_multiplies_as_the_layer_does():
    layer = frozen_layer()
    pack_linear_layers(layer)
    hidden = torch.randn(2, SIZE)
    assert torch.equal(copy.deepcopy(layer)(hidden), layer(hidden))


@pytest.mark.parametrize("compiles", [True, False])
def test_weights_are_packed_if_the_cpu_compiles(compiles):
    layer = frozen_layer()
    device = cpu_device(compiles=compiles)
    device.pack_weights(layer)
    assert (hasattr(layer, "packed_key"), device.packs_weights) == (compiles, compiles)


COUNT_FAULTS = """
import resource
import torch
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device

open_device(DeviceConf(name=DeviceName.cpu))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(60):
    torch.ones(12 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.system
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_a_freed_tensor_of_48_mib_is_used_again_without_page_faults():
    faults = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, check=True).stdout
    pages = 12 * 2**20 * 4 / resource.getpagesize()
    assert int(faults) < 30 * pages  # 60 without; a few, as small blocks behind freed ones make the heap grow at first
