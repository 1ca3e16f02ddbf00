"""Set a single thread (TEST_THREADS), no network and fixed seeds; build the small models that tests share."""

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is compared here are the numbers of a CPU; commands would take the GPU

import pytest
import torch

from tests.support.decoding.agreeing import build_small_drafts, build_small_target
from tests.support.models.tiny import batch_of, learn, new_draft, sampled_texts, tiny_target
from tests.support.reports.sample_reports import build_comparison_report, build_draft_report
from tests.support.runs.trained_once import TrainedOnce

# Small matrices are many times slower on several threads, and their sums are rounded otherwise.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

TESTS = Path(__file__).parent
collect_ignore = ["neuron_device"]  # runs in processes of its own
# folder of tests/ -> the mark of its tests
MARKED = {
    "long": pytest.mark.slow,
    "system": pytest.mark.system,
    "engines": pytest.mark.engines,
    "xla": pytest.mark.xla,
}


# Functions of these rooms pass tensors to each other.
SHAPED = (
    "models infer/engine infer/verify infer/measure data/features data/packing train/rows train/test_trainer.py"
).split()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if any(item.path.is_relative_to(TESTS / room) for room in SHAPED) and not item.get_closest_marker("no_shapes"):
            item.add_marker(pytest.mark.shapes)
        if mark := MARKED.get(item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""):
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _reset_global_state():
    torch.manual_seed(0)
    logging.root.setLevel(logging.WARNING)


@pytest.fixture
def read_refusal(monkeypatch, capfd):
    """Return a function that runs a command, which must exit with code 2, and returns its one line of error."""

    def read_refusal(main: Callable[[], object], *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [main.__module__, *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    return read_refusal


@pytest.fixture
def fresh_compiler():
    """Forget the graphs of earlier tests: torch.compile allows eight for each function."""
    torch.compiler.reset()


@pytest.fixture(scope="session")
def target():
    """Build a random Qwen3 of six layers in fp32; its logits are sharp, so that its texts vary instead of looping."""
    return tiny_target(seed=0)


@pytest.fixture(scope="session")
def trained_once(request):
    """Keep trained weights between test runs and share them among workers."""
    return TrainedOnce(request.config.cache.mkdir("trained"))


@pytest.fixture(scope="session")
def learned(target, trained_once):
    """Train an EAGLE-3 draft on texts of the target; return both."""
    texts = sampled_texts(target, count=8, length=40)
    draft = new_draft(target)
    train = partial(learn, draft, target, batch_of(texts), steps=250)
    trained_once.train("learned", draft, train)
    return draft, texts


@pytest.fixture(scope="session")
def small():
    """Build a target of sixteen words, cheap enough to sample thousands of texts."""
    return build_small_target()


@pytest.fixture(scope="session")
def drafts(small, trained_once):
    """Return drafts that partly agree with `small`, by name."""
    return build_small_drafts(small, trained_once)


@pytest.fixture(scope="module")
def report():
    """Build a report on a single draft."""
    return build_draft_report()


@pytest.fixture(scope="module")
def comparison():
    """Build a report that compares three drafts."""
    return build_comparison_report()
