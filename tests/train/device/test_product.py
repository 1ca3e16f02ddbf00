"""A product runs in a process of its own, whose error, crash or silence fails its check."""

import os
import time
from dataclasses import replace

import pytest

from models.device.device import Device
from tests.support.models.tiny import CPU
from train.device import product
from train.device.checks import CheckContext, CheckFailedError, run_check
from train.device.place import find_cache_folder

pytestmark = pytest.mark.system  # each function is a process


class RoundingDevice(Device):
    """A device that rounds its products to integers."""

    def compile(self, function, **options):
        return lambda *args: function(*args).round()


def test_a_device_that_multiplies_passes_and_no_cache_is_a_reason_to_skip(tmp_path):
    outcomes = [run_check("product", check) for check in product.list_checks(CheckContext(device=CPU, folder=tmp_path))]
    assert [outcome.result for outcome in outcomes] == ["PASS", "PASS", "SKIP"], outcomes


def test_a_wrong_product_fails_with_the_remedy_of_the_compiler(tmp_path):
    context = CheckContext(device=RoundingDevice(**vars(CPU)), folder=tmp_path)
    eager, compiled, _ = (run_check("product", check) for check in product.list_checks(context))
    assert eager.result == "PASS"
    assert (compiled.result, compiled.detail) == ("FAIL", "the product is not the CPU's")
    assert compiled.remedy.startswith("the compiler fails")


def write_graph(device: Device, compiles: bool) -> float:
    folder = find_cache_folder(device)
    assert folder is not None
    (folder / f"{os.getpid()}.so").touch()
    (folder / f"{os.getpid()}.lock").touch()
    return 0.0


def test_graphs_that_are_compiled_again_fail(tmp_path, monkeypatch):
    """A function that always writes a file stands for a compiler that does not find its graphs again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    device = replace(CPU, compiles=True)
    assert find_cache_folder(device) == tmp_path
    monkeypatch.setattr(product, "multiply", write_graph)
    with pytest.raises(CheckFailedError, match=r"compiled again \(1 new files in .*\): 0.0 s, 3.0 s the first time"):
        product.compile_again(device, 3.0)


@pytest.mark.parametrize(
    ("function", "argument", "detail"),
    [
        (os._exit, 4, "the process ended with 4"),
        (time.sleep, 300, "the process did not end within 3 s"),
        (int, "x", "ValueError: invalid literal for int() with base 10: 'x'"),
    ],
)
def test_a_process_that_does_not_answer_fails(function, argument, detail):
    with pytest.raises(CheckFailedError) as failure:
        product.run_alone(function, argument, timeout_s=60 if detail != "the process did not end within 3 s" else 3)
    assert str(failure.value) == detail
