"""A target and a feature store of it, for tests of what trains from the store."""

import pytest

from data.config import Dtype
from tests.support.data import captured
from tests.support.runs.stored_run import BF16, EAGLE3, documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Save a target and its documents."""
    return documents(captured.written(tmp_path_factory.mktemp("stored"), target))


@pytest.fixture(scope="module")
def store(folder):
    """Capture a store of EAGLE-3 in bf16, from a target in bf16."""
    conf = captured.conf(folder, draft=EAGLE3, precision=BF16, dtype=Dtype.bf16, run_name="eagle3")
    return captured.captured(conf)
