"""What holds for every file: hardware and Hydra named in one place, files that fit a reader."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("conf", "data", "infer", "models", "train")
PRODUCT = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
HYDRA = re.compile(r"^\s*(import|from) (hydra|omegaconf)\b", re.MULTILINE)
HARDWARE = re.compile(
    r"(?<![a-z])(cuda|xla|neuronx?|nccl)(?![a-z])"
)  # prose may say CUDA and Neuron
MAY_NAME_HARDWARE = ("models/device/", "train/distributed/parallel.py", "train/distributed/xla.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_hardware_is_named_in_two_places(path):
    if not name(path).startswith(MAY_NAME_HARDWARE):
        assert not HARDWARE.findall(path.read_text())


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_hydra_is_known_to_one_module(path):
    if name(path) != "conf/entry.py":
        assert not re.search(
            r"^\s*(import|from) (hydra|omegaconf)\b", path.read_text(), re.MULTILINE
        )


@pytest.mark.parametrize("path", [p for p in PRODUCT + SCRIPTS if p.read_text()], ids=name)
def test_modules_say_what_they_are_for_and_stay_short(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 400
    assert text.isascii()


def test_no_module_is_a_drawer():
    drawers = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not [name(path) for path in PRODUCT if drawers & {path.stem, path.parent.name}]
