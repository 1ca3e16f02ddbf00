"""Experts, and keys that are gathered, decode split over two processes as on one; tests/long has all families."""

import json
from pathlib import Path

import pytest

from tests.support.decoding.split_families_run import decode_split

NAMES = ("olmo3", "gpt_oss")  # the vocabulary of this OLMo 3 is odd


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    decode_split(folder, NAMES, processes=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "gpt_oss, compiled"])
def test_two_processes_write_the_tokens_of_a_single_one(folder, name):
    alone = json.loads((folder / "alone.json").read_text())[name.partition(",")[0]]
    for rank in range(2):
        assert json.loads((folder / f"rank-{rank}.json").read_text())["answers"][name] == alone
