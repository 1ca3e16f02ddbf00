"""Two processes that read one store learn what one process learns."""

import pytest

from data.config import Dtype
from models.drafts.options import Eagle3Conf
from tests.support.data import captured
from tests.support.models.tiny import LAYERS
from tests.support.runs.stored_run import BF16, documents, learned, losses, ranks, training


def test_two_processes_read_the_rows_of_one(tmp_path, target):
    folder, draft = (documents(captured.written(tmp_path, target)), Eagle3Conf(layers=LAYERS, ttt_steps=2))
    wanted = captured.conf(folder, draft=draft, precision=BF16, dtype=Dtype.bf16)
    store = captured.captured(wanted)
    ranks(folder, store, "two", processes=2)
    learned(training(folder, draft, name="one", store=store))
    one, two = losses(folder, "one"), losses(folder, "two")
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two == pytest.approx(one, rel=2e-3)  # halves of a sum in bf16
