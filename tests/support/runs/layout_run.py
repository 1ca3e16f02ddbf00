"""Train every method in turn: layout_run.py FOLDER ROWS_AT_A_TIME.

By itself it is a single process; under a launcher each process learns from its share of every step.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.config import DataConf, OnPolicyConf
from models.device.device import Device
from models.drafts.options import (
    CausalLMConf,
    DraftConf,
    Eagle1Conf,
    Eagle3Conf,
    HydraConf,
    InitFrom,
    LoraConf,
    Medusa2Conf,
    MedusaConf,
)
from models.losses.config import LossConf, LossName, Reduction
from models.parallel.processes import leave_processes
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.models.tiny import CPU, tiny_tokenizer
from tests.support.runs.toy_run import VOCAB, ToyConf, build_toy_model, toy_conf, toy_run

ROWS, STEPS = 8, 20  # rows of a step, steps of a run
LEARNING_RATE = 1e-3


@dataclass(kw_only=True)
class Learner:
    """A method with everything switched on that is random or depends on the step."""

    draft: DraftConf
    data: dict[str, Any] = field(default_factory=dict)
    loss: LossConf = field(default_factory=lambda: LossConf(name=LossName.soft_ce))


BY_TOKEN = LossConf(name=LossName.soft_ce, reduction=Reduction.token)
LEARNERS = {
    "toy, dropout": Learner(draft=ToyConf(dropout=0.3)),
    "eagle3, reduced": Learner(draft=Eagle3Conf(layers=[0, 1, 2], ttt_steps=2, vocab_size=20)),
    "hass, noise": Learner(draft=Eagle1Conf(feature_noise=0.2, ttt_steps=2)),
    "medusa": Learner(draft=MedusaConf(heads=2)),
    "medusa2, ramp": Learner(draft=Medusa2Conf(heads=2, lora=LoraConf(rank=4), heads_warmup=12), loss=BY_TOKEN),
    "hydra, dropout": Learner(draft=HydraConf(heads=2, dropout=0.3)),
    "draft model, own answers": Learner(
        draft=CausalLMConf(init_from=InitFrom.pruned, layers=[0, 2]),
        loss=BY_TOKEN,
        data={"on_policy": OnPolicyConf(share=0.5, interval=5)},
    ),
}


def build_layout_target(device: Device = CPU) -> Target:
    """Build a target of four layers with logits sharp enough that its hidden states matter."""
    model = build_toy_model(
        num_hidden_layers=4,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
        attention_dropout=0.1,  # a draft model inherits it, and must not draw by micro-batch
    )
    return freeze_model(model, tiny_tokenizer(VOCAB), name="layout", device=device)


def train(name: str, folder: Path, *, at_a_time: int) -> None:
    """Train 20 steps of eight rows; `at_a_time` of them are a micro-batch."""
    learner = LEARNERS[name]
    conf = toy_conf(
        draft=learner.draft,
        data=DataConf(seed=1, **learner.data),
        loss=learner.loss,
        optim={
            "steps": STEPS,
            "rows_per_step": ROWS,
            "micro_batch_size": at_a_time,
            "lr": LEARNING_RATE,
            "max_grad_norm": 1e3,  # a clipped gradient has the same norm at every scale
        },
        interval={"eval": STEPS, "save": STEPS},
    )
    toy_run(folder / name, conf, target=build_layout_target())


def train_all(folder: Path, *, at_a_time: int) -> None:
    for name in LEARNERS:
        train(name, folder, at_a_time=at_a_time)


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), at_a_time=int(sys.argv[2]))
    leave_processes()
