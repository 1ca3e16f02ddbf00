"""Targets of six families, two of them mixtures of experts, decode split over four processes as on one."""

import json
from pathlib import Path

import pytest

from tests.support.decoding.split_families_run import COMPILED, FAMILIES, decode_split

PROCESSES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    decode_split(folder, list(FAMILIES), processes=PROCESSES)
    return folder


@pytest.mark.parametrize("name", [*FAMILIES, *(f"{name}, compiled" for name in COMPILED)])
def test_four_processes_write_the_tokens_of_a_single_one(folder, name):
    alone = json.loads((folder / "alone.json").read_text())[name.partition(",")[0]]
    for rank in range(PROCESSES):
        assert json.loads((folder / f"rank-{rank}.json").read_text())["answers"][name] == alone


@pytest.mark.parametrize("name", FAMILIES)
def test_a_process_holds_its_part_of_the_weights(folder, name):
    """Attention of gpt-oss, of which the plan splits experts and embeddings alone, stays whole."""
    held = json.loads((folder / "rank-0.json").read_text())["held"][name]
    assert held <= (0.45 if name == "gpt_oss" else 0.27)
