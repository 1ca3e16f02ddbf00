"""Training and decoding pass on a CPU; each planted fault fails its check with the remedy."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.device.config import DeviceConf, DeviceName
from models.device.device import Device
from models.device.graph_budget import GraphLedger
from models.device.opening import open_device
from models.trees import growth
from tests.support.models.tiny import CPU
from tests.support.stages.faulty import change_result, replace_inside
from train.device import functions
from train.device.checks import Check, CheckContext, Outcome, run_check

DYNAMIC = "decoding, draft model, dynamic tree, batch 1"


def list_checks(device: Device) -> dict[str, Check]:
    checks = list(functions.list_checks(CheckContext(device=device, folder=Path())))
    by_name = {check.name: check for check in checks}
    assert len(by_name) == len(checks)  # a check is resumed by its name
    return by_name


def run_named(name: str, device: Device) -> Outcome:
    return run_check("functions", list_checks(device)[name])


def mark(name: str):
    is_long = name.endswith(f"batch {functions.BATCH}")
    return pytest.param(name, marks=[pytest.mark.system] if is_long else [])


@pytest.mark.parametrize("name", [mark(name) for name in list_checks(CPU)])
def test_every_function_passes_on_the_cpu(name):
    outcome = run_named(name, CPU)
    assert outcome.result == "PASS", outcome.detail


# --- decoding ---------------------------------------------------------------------------------


def drop_sort(_, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Take the first values in place of the highest."""
    return values[:, :count], torch.arange(count).expand(len(values), -1)


@pytest.mark.parametrize("batch", [1, functions.BATCH])
def test_a_tree_of_the_wrong_nodes_fails_by_its_acceptance(batch):
    """The answers are right nevertheless: only the number of accepted tokens tells."""
    device = replace_inside(growth, "stable_topk", drop_sort)
    outcome = run_named(f"decoding, draft model, dynamic tree, batch {batch}", device)
    assert (outcome.result, outcome.remedy) == ("FAIL", functions.WRONG)
    assert re.match(r"row \d: accepted \[.*\] in place of \[.*\]; run eagerly: ", outcome.detail)


def test_other_tokens_fail():
    def write_token(result):
        state, output = result
        output.ids_and_count[:, :-1] = 1
        return state, output

    outcome = run_named(DYNAMIC, change_result("fused", write_token))
    assert (outcome.result, outcome.remedy) == ("FAIL", functions.WRONG)
    assert outcome.detail.startswith("row 0: tokens [")


def test_a_device_that_fails_in_the_second_decoding_fails_too():
    """Memory that the first decoding leaves behind changes the second."""
    rounds = []

    def spoil(result):
        rounds.append(result)
        state, output = result
        if len(rounds) > functions.NEW_TOKENS:
            output.ids_and_count[:, :-1] = 1
        return state, output

    outcome = run_named("decoding, alone, batch 1", change_result("fused", spoil))
    assert outcome.detail.startswith("row 0: tokens [")
    assert len(rounds) > functions.NEW_TOKENS


class StridedDevice(Device):
    """A device whose rounds return the next proposal with other strides, so that PyTorch compiles them again."""

    def _compile_function(self, function, frozen_names, kind):
        compiled = super()._compile_function(function, frozen_names, kind)
        if function.__name__ != "fused":
            return compiled

        def strided(*args):
            state, output = compiled(*args)
            ids = state.proposal.ids.repeat_interleave(2, 1)[:, ::2]
            return replace(state, proposal=replace(state.proposal, ids=ids)), output

        return strided


def count_graphs(build: type[Device]) -> Outcome:
    compiling = vars(CPU) | {"compiles": True, "backend": "eager", "ledger": GraphLedger()}
    return run_named("decoding, lookup, batch 1", build(**compiling))


@pytest.mark.system
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_rounds_need_the_announced_graphs():
    outcome = count_graphs(Device)
    assert outcome.result == "PASS", outcome.detail
    assert outcome.detail.startswith("3 graphs, ")


@pytest.mark.system
@pytest.mark.usefixtures("fresh_compiler")
def test_a_round_that_is_compiled_again_for_its_strides_fails():
    outcome = count_graphs(StridedDevice)
    assert (outcome.result, outcome.remedy) == ("FAIL", functions.WRONG)
    assert outcome.detail == "graphs: 3 announced, 4 compiled"


# --- training ---------------------------------------------------------------------------------


def scale_gradient(loss, metrics, gradient):
    """Leave the loss as it is, with a gradient of the hidden states that is 1 % too large."""
    return loss, metrics, 1.01 * gradient


def scale_loss(loss, metrics, gradient):
    """Leave the gradient as it is, with a loss that is 1 % too large."""
    return 1.01 * loss, metrics, gradient


def spoil(loss, metrics, gradient):
    return loss * torch.nan, metrics, gradient * torch.nan


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (scale_gradient, "loss off by 0.0e+00, gradient off by 1.0e-02"),
        (scale_loss, "loss off by 1.0e-02, gradient off by 0.0e+00"),
        (spoil, "loss off by nan, gradient off by nan"),
    ],
)
def test_a_wrong_loss_or_gradient_fails(change, detail):
    outcome = run_named("training, demo", change_result("evaluate_chunk", lambda results: change(*results)))
    assert (outcome.result, outcome.remedy) == ("FAIL", functions.WRONG)
    assert outcome.detail == detail


# --- precision --------------------------------------------------------------------------------


def test_a_low_precision_that_is_lower_than_that_of_the_cpu_fails():
    """Two significant bits are off by 0.25 / sqrt(12) / 0.75 = 10 %, four layers in bfloat16 by 2 %."""

    def round_hidden(output):
        return replace(output, hidden=round_bits(output.hidden, bits=2))

    outcome = run_named("accuracy of low precision", change_result("run_target", round_hidden))
    assert outcome.result == "FAIL"
    assert outcome.remedy.startswith("set device.precision=float32")
    assert outcome.detail.startswith("logits in bfloat16 off by ")


def round_bits(values: Tensor, *, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(values.float())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(values.dtype)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("method", [pytest.param("demo-lm", marks=pytest.mark.slow), "demo-medusa2"])
def test_a_compiled_loss_has_the_gradient_of_an_eager_one(method, tmp_path):
    device = open_device(DeviceConf(name=DeviceName.cpu))
    functions.compare_training(method, device, CheckContext(device=device, folder=tmp_path).reference)
