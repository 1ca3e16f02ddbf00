"""Operators pass on a CPU; each planted fault fails the checks of its operators, with their remedy."""

from functools import partial

import pytest
import torch
from torch import Tensor

from models.device.device import Device
from models.operators import stable_topk
from models.trees import keyed_noise
from tests.support.models.tiny import CPU
from tests.support.models.watching import WatchedOperators
from tests.support.stages.faulty import build_faulty, change_result, replace_inside
from train.device import operators
from train.device.checks import CheckContext, CheckFailedError, Outcome, run_check

AVOIDED = "(not needed) "


def run_operators(folder, device: Device) -> dict[str, Outcome]:
    """Return the outcomes of the stage by the names of its checks."""
    checks = list(operators.list_checks(CheckContext(device=device, folder=folder)))
    outcomes = {check.name: run_check("operators", check) for check in checks}
    assert len(outcomes) == len(checks)  # a check is resumed by its name
    return outcomes


def select(outcomes: dict[str, Outcome], *results: str) -> dict[str, Outcome]:
    return {name: outcome for name, outcome in outcomes.items() if outcome.result in results}


def test_every_operator_passes_on_the_cpu(tmp_path):
    outcomes = run_operators(tmp_path, CPU)
    assert select(outcomes, "FAIL", "ABSENT", "SKIP") == {}
    assert {outcome.detail for outcome in outcomes.values()} == {"equal"}
    assert any(name.startswith(AVOIDED) for name in outcomes)


# --- noise ------------------------------------------------------------------------------------


def round_products(multiply, word, digits):
    """Multiply with eight significant bits, as units for bf16 do."""
    low, high = (limb.bfloat16().int() for limb in word)
    return multiply((low, high), digits)


def saturate_products(_, word, digits):
    """Multiply as a unit does whose int32 ends at its largest value in place of wrapping around."""
    number = (word[1].long() << 16 | word[0].long()) * sum(digit << 8 * index for index, digit in enumerate(digits))
    product = number.clamp_max(2**31 - 1)
    return (product & 0xFFFF).int(), (product >> 16).int()


@pytest.mark.parametrize("fault", [round_products, saturate_products])
def test_noise_of_wrong_integers_fails_with_its_remedy(fault, tmp_path):
    def multiply_on_device(multiply, word, digits):
        """Multiply tensors by the fault; the host multiplies its integers rightly."""
        return fault(multiply, word, digits) if isinstance(word[0], Tensor) else multiply(word, digits)

    device = replace_inside(keyed_noise, "_multiply_words", multiply_on_device)
    failed = select(run_operators(tmp_path, device), "FAIL", "ABSENT")
    assert set(failed) == {"noise, 32,000 columns", "noise, 151,936 columns", "bits of noise"}
    assert {outcome.remedy for outcome in failed.values()} == {operators.NOISE}
    assert failed["bits of noise"].detail == "8 of 8 values differ"


def test_noise_that_differs_in_its_last_bit_fails(tmp_path):
    device = replace_inside(keyed_noise, "draw_uniform", lambda draw, *args: draw(*args) * (1 + 2**-23))
    failed = select(run_operators(tmp_path, device), "FAIL", "ABSENT")
    assert set(failed) == {"bits of noise"}
    assert failed["bits of noise"].remedy == operators.NOISE


# --- operators that are absent ----------------------------------------------------------------


def refuse(operator: str) -> Device:
    """Return a device that lacks an operator of ATen."""

    def raise_error(func, *_):
        if func.overloadpacket.__name__ == operator:
            raise RuntimeError(f"aten.{operator} is not supported")

    def wrap(function):
        def watched(*args):
            with WatchedOperators(raise_error):
                return function(*args)

        return watched

    return build_faulty(wrap)


def test_an_absent_operator_fails_where_it_is_needed_and_is_noted_where_it_is_avoided(tmp_path):
    outcomes = run_operators(tmp_path, refuse("argmax"))
    failed, absent = select(outcomes, "FAIL"), select(outcomes, "ABSENT")
    assert set(failed) == {"argmax, 32,000 columns", "argmax, 151,936 columns"}
    assert {outcome.remedy for outcome in failed.values()} == {operators.NEEDED}
    assert set(absent) == {f"{AVOIDED}argmax of integers"}
    assert {outcome.remedy for outcome in absent.values()} == {""}
    details = {outcome.detail for outcome in (*failed.values(), *absent.values())}
    assert details == {"RuntimeError: aten.argmax is not supported"}


@pytest.mark.parametrize("operator", ["sort", "tril", "remainder"])
def test_no_needed_check_has_an_operator_that_graphs_avoid(operator, tmp_path):
    outcomes = run_operators(tmp_path, refuse(operator))
    assert select(outcomes, "FAIL") == {}
    assert any(operator in name for name in select(outcomes, "ABSENT"))


# --- wrong results ----------------------------------------------------------------------------


def move(function):
    """Let the tensor that is written in place end in other memory."""

    def moving(cache: Tensor, *args):
        result = function(cache, *args)
        cache.set_(cache.clone())  # pyright: ignore[reportArgumentType]
        return result

    return moving if function.__name__ == "_write_slots" else function


def write_copy(function):
    """Let a cache stay as it was, because only its copy is written."""
    if function.__name__ != "_write_slots":
        return function
    return lambda cache, *args: function(cache.clone(), *args)


@pytest.mark.parametrize(
    ("fault", "detail"), [(move, "a tensor that is written in place has moved"), (write_copy, "differs by up to")]
)
def test_a_cache_that_moves_or_is_not_written_fails(fault, detail, tmp_path):
    failed = select(run_operators(tmp_path, build_faulty(fault)), "FAIL")
    assert set(failed) == {"write into a cache in place"}
    (outcome,) = failed.values()
    assert outcome.detail.startswith(detail)
    assert outcome.remedy == operators.NEEDED


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda index: index.int(), "torch.int32 of (5,) in place of torch.int64 of (5,)"),
        (lambda index: index[:, None], "torch.int64 of (5, 1) in place of torch.int64 of (5,)"),
        (lambda index: index + (torch.arange(5) == 2), "1 of 5 values differ"),
    ],
)
def test_a_result_of_another_type_shape_or_value_fails(change, detail, tmp_path):
    failed = select(run_operators(tmp_path, change_result("_argmax", change)), "FAIL")
    assert set(failed) == {"argmax, 32,000 columns", "argmax, 151,936 columns"}
    assert {(outcome.detail, outcome.remedy) for outcome in failed.values()} == {(detail, operators.NEEDED)}


def test_a_result_with_the_strides_of_another_layout_fails(tmp_path):
    """The values lie as a transposed result would: the strides read them in the wrong order."""
    device = change_result("_attend", lambda result: result.mT.contiguous().view(result.shape))
    failed = select(run_operators(tmp_path, device), "FAIL")
    assert set(failed) == {"attention with a mask", "attention with a mask, gradient"}


def test_a_wrong_gradient_fails_although_the_result_is_right(tmp_path):
    device = change_result("_embed", lambda result: result.detach() + 1.1 * (result - result.detach()))
    (outcome,) = select(run_operators(tmp_path, device), "FAIL").values()
    assert outcome.name == "embedding, gradient"


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1.01])
def test_a_number_far_from_the_right_one_fails(wrong):
    with pytest.raises(CheckFailedError, match="differs by up to"):
        operators.compare_results([torch.tensor([0.5, wrong])], [torch.tensor([0.5, 1.0])])


def test_numbers_must_be_equal_bit_for_bit_only_where_it_is_asked():
    close, right = torch.tensor([1.0, 2.0 + 2**-22]), torch.tensor([1.0, 2.0])
    assert operators.compare_results([close], [right]) == "differs by up to 2e-07"
    with pytest.raises(CheckFailedError, match="1 of 2 values differ"):
        operators.compare_results([close], [right], is_exact=True)


def test_an_order_of_equal_values_that_is_not_stable_fails(tmp_path):
    def prefer_later(right, values, count):
        top, index = right(values.flip(1), count)
        return top, values.shape[1] - 1 - index

    device = build_faulty(lambda f: partial(prefer_later, f) if f is stable_topk else f)
    (outcome,) = select(run_operators(tmp_path, device), "FAIL").values()
    assert outcome.name == "stable_topk of 16"
    assert outcome.detail.endswith(" of 80 values differ")


def test_a_result_that_is_missing_fails(tmp_path):
    failed = select(run_operators(tmp_path, change_result("topk_rows", lambda pair: pair[0])), "FAIL")
    assert len(failed) == len(operators.VOCABULARIES) * len(operators.COUNTS)
