"""Optimizers group the weights as promised, and schedules stay within their bounds."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import AdamW, Muon

from conf.entry import compose
from models.io.errors import UserError
from train.config.optim import OptimConf, OptimName, Schedule
from train.config.run import TrainConf
from train.optim import allocate_optimizer_states, build_optimizers


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 8, bias=False)


def find_names(module: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    by_id = {id(p): name for name, p in module.named_parameters()}
    return {by_id[id(p)] for p in parameters}


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    small = Small()
    optimizers, _ = build_optimizers(OptimConf(name=OptimName.muon, lr=1e-3), small)
    adamw, muon = optimizers
    assert isinstance(adamw, AdamW)
    assert isinstance(muon, Muon)
    assert find_names(small, muon.param_groups[0]["params"]) == {"hidden.weight"}
    rest = [p for group in adamw.param_groups for p in group["params"]]
    assert find_names(small, rest) == {"embed.weight", "hidden.bias", "norm.weight", "norm.bias", "lm_head.weight"}
    assert muon.param_groups[0]["initial_lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize("name", OptimName)
def test_optimizers_have_the_configured_settings(name):
    small = Small()
    small.hidden.weight.lr_scale = small.hidden.bias.lr_scale = 0.5
    conf = OptimConf(name=name, lr=1e-3, muon_lr=1e-2, betas=[0.7, 0.8], weight_decay=0.3, warmup_ratio=0.0)
    optimizers, _ = build_optimizers(conf, small)
    groups = {
        find_names(small, [parameter]).pop(): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for weight, scale in (("hidden.weight", 0.5), ("hidden.bias", 0.5), ("lm_head.weight", 1.0), ("norm.weight", 1.0)):
        optimizer, group = groups[weight]
        is_adamw = isinstance(optimizer, AdamW)
        assert group["initial_lr"] == pytest.approx((1e-3 if is_adamw else 1e-2) * scale)
        assert not is_adamw or group["betas"] == (0.7, 0.8)
    assert groups["hidden.weight"][1]["weight_decay"] == groups["lm_head.weight"][1]["weight_decay"] == 0.3


def test_norms_biases_and_embeddings_do_not_decay():
    small = Small()
    (adamw,), _ = build_optimizers(OptimConf(weight_decay=0.1), small)
    decays = {
        name: group["weight_decay"] for group in adamw.param_groups for name in find_names(small, group["params"])
    }
    assert {name for name, decay in decays.items() if decay} == {"hidden.weight", "lm_head.weight"}


def test_a_fused_adamw_takes_the_steps_of_the_plain_one():
    ends = []
    for adamw in (AdamW, partial(AdamW, fused=True)):
        torch.manual_seed(0)
        small = Small()
        (optimizer,), _ = build_optimizers(OptimConf(lr=1e-2), small, adamw)
        allocate_optimizer_states([optimizer])
        for _ in range(3):
            optimizer.zero_grad()
            small.lm_head(small.norm(small.hidden(small.embed.weight))).square().sum().backward()
            optimizer.step()
        ends.append(small.state_dict())
    torch.testing.assert_close(*ends)


def test_the_states_of_a_fused_adamw_are_all_where_its_weights_are():
    with FakeTensorMode():  # needs no GPU
        small = nn.Linear(4, 4, bias=False)
        small.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
        (adamw,), _ = build_optimizers(OptimConf(), small, partial(AdamW, fused=True))
        allocate_optimizer_states([adamw])
        assert {state.device.type for state in adamw.state[small.weight].values()} == {"cuda"}


@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule_warms_up_and_stays_within_its_bounds(schedule):
    conf = OptimConf(warmup_ratio=0.1, decay_ratio=0.3, min_lr_ratio=0.1, schedule=schedule)
    factors = [conf.rate_factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] > 0.99
    assert all(0.1 <= factor <= 1 for factor in factors)
    assert all(a >= b for a, b in pairwise(factors[10:]))


def test_cosine_passes_the_middle_and_ends_near_its_floor():
    conf = OptimConf(warmup_ratio=0.0, min_lr_ratio=0.2)
    assert conf.rate_factor(49, 100) == pytest.approx(0.6, abs=0.01)
    assert conf.rate_factor(99, 100) == pytest.approx(0.2, abs=0.01)


def test_the_schedule_is_a_function_of_the_step_alone():
    conf = OptimConf(steps=20, lr=0.5)
    (optimizer,), (schedule,) = build_optimizers(conf, Small())
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * conf.rate_factor(step, 20))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, r"optim\.steps: must be at least 1, got 0"),
        ({"epochs": 0.0}, r"optim\.epochs: must be positive, got 0"),
        ({"warmup_ratio": 1.5}, r"optim\.warmup_ratio: is a share and must lie in 0\.\.1, got 1\.5"),
        ({"lr": -1.0}, r"optim\.lr: must be positive, got -1\.0"),
        ({"betas": [0.9]}, r"optim\.betas: must be two numbers in \[0, 1\), got \[0\.9\]"),
        ({"warmup_ratio": 0.5, "decay_ratio": 0.6, "schedule": Schedule.wsd}, r"optim\.warmup_ratio: .*share"),
    ],
)
def test_wrong_settings_are_refused_by_key(wrong, message):
    with pytest.raises(UserError, match=message):
        OptimConf(**wrong)


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [
        (["optim.epochs=null", "optim.steps=5"], 5, None),  # a short trial
        (["optim.epochs=null"], None, None),  # the default number of steps
        (["optim.epochs=3"], None, 2),
        (["draft.heads_epochs=null", "draft.heads_steps=7"], 7, None),
        (["optim.epochs=null", "optim.steps=5", "draft.heads_epochs=null", "draft.heads_steps=7"], 7, None),
    ],
)
def test_a_first_stage_takes_steps_or_epochs_as_its_run_does(overrides, steps, epochs):
    stage = compose("train", TrainConf, ["draft=qwen3-8b-medusa2", *overrides]).first_stage()
    assert (stage.optim.steps, stage.optim.epochs) == (steps, epochs)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_first_stage_scales_every_rate(scale):
    """The rates of AdamW and of Muon are both scaled."""
    rates = ["optim=muon", "optim.lr=1e-3", "optim.muon_lr=0.02", f"draft.heads_lr_scale={scale}"]
    stage = compose("train", TrainConf, ["draft=qwen3-8b-medusa2", *rates]).first_stage()
    assert (stage.optim.lr, stage.optim.muon_lr) == (scale * 1e-3, scale * 0.02)
