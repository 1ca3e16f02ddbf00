"""One thread, no network, fixed seeds; the small models that tests share."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # small matrices are many times slower on several threads


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Fixtures `target` and `tokenizer`: a tiny random target, built in code, stand here.
