"""A tracker that refuses a run ends it in one line."""

import pytest
import wandb
from accelerate import Accelerator

from models.io.errors import UserError
from models.io.tracking import TrackerConf, Wandb
from train.run.log import MetricLogger
from train.run.state import RunState


def test_a_run_that_wandb_refuses_is_refused_in_a_single_line(tmp_path, monkeypatch):
    def fail(**_):
        raise wandb.errors.CommError("entity typo not found.\nTraceback ...")

    monkeypatch.setattr(wandb, "init", fail)
    conf = TrackerConf(wandb=Wandb.offline, entity="typo")
    with pytest.raises(UserError) as error:
        MetricLogger(conf, RunState(tmp_path, {}), Accelerator(cpu=True, log_with="wandb"))
    assert str(error.value) == (
        "log.wandb: W&B must take the results, got entity typo not found; check log.entity and log.project, or take "
        "log=wandb-offline"
    )
