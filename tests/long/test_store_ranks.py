"""Two processes that read one store learn what a single process learns."""

import pytest

from data.config import Dtype
from models.drafts.options import Eagle3Conf
from tests.support.data import captured
from tests.support.models.tiny import LAYERS
from tests.support.runs import launch_script
from tests.support.runs.stored_run import BF16, documents, learned, losses, training


def test_two_processes_learn_from_a_store_what_a_single_one_learns(tmp_path, target):
    folder, draft = (documents(captured.written(tmp_path, target)), Eagle3Conf(layers=LAYERS, ttt_steps=2))
    capture_conf = captured.conf(folder, draft=draft, precision=BF16, dtype=Dtype.bf16)
    store = captured.captured(capture_conf)
    launch_script("stored_run.py", folder, store, "two", processes=2)
    learned(training(folder, draft, name="single", store=store))
    single, parallel = losses(folder, "single"), losses(folder, "two")
    assert parallel[0] == pytest.approx(single[0], rel=1e-5)
    assert parallel == pytest.approx(single, rel=2e-3)  # halves of a sum in bf16
