"""One thread, no network, fixed seeds; the small models that tests share."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # small matrices are many times slower on several threads

MARKED = {"long": pytest.mark.slow, "engines": pytest.mark.engines}  # folder of tests/ -> its mark


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if mark := MARKED.get(item.path.parent.name):
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Fixtures `target` and `tokenizer`: a tiny random target, built in code, stand here.
