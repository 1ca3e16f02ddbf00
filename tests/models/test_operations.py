"""The operations of a loss and of a training step: no random draws, no reads of values."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.config import DataConf
from data.features.target_pass import features
from models.distill.config import LossConf
from models.drafts.config.eagle1 import Eagle1Conf
from models.drafts.registry import build_draft
from tests.support.compiled_run import counted_reads
from tests.support.graphs_run import LENGTH, ROWS, loop_over, texts
from tests.support.methods import CASES
from tests.support.tiny import CPU, batch_of
from tests.support.toy_run import toy_conf

RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal", "uniform")
# what a host must read, or what has as many results as its values want; `nonzero` only an eager
# CPU does, to leave out rows without weight (models/distill/losses.py): no compiled graph would
DYNAMIC = ("_local_scalar_dense", "masked_select", "unique", "repeat_interleave")


class Operations(TorchDispatchMode):
    """Names of the operations below Python."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_loss_draws_nothing_reads_nothing_and_has_no_shape_of_its_values(target, name):
    draft = CASES[name].build(target)
    batch = batch_of(texts(*[LENGTH] * ROWS))
    seen = features(target, draft.needs.layers, batch)
    extras = draft.prepare_batch(batch, step=3, generators=numbered(range(ROWS)))
    weights = draft.term_weights(batch)
    if weights is not None:
        extras["step_weights"] = 2 * weights
    with Operations() as done:
        draft.loss(batch, seen, **extras).total.backward()
    assert "mul" in done.names
    assert not [n for n in done.names if any(word in n for word in (*RANDOM, *DYNAMIC))]


def numbered(rows):
    return [np.random.default_rng([0, 3, row]) for row in rows]


def test_noise_is_drawn_before_the_loss_from_numbers_that_belong_to_the_rows(target):
    draft = build_draft(Eagle1Conf(feature_noise=0.5), target, loss=LossConf(), seed=0)
    batch = batch_of(texts(*[LENGTH] * ROWS))
    batch.document_ids[:, LENGTH // 4 :] = 1  # a short document and a long one
    seen = features(target, draft.needs.layers, batch)
    with Operations() as done:
        drawn = draft.prepare_batch(batch, step=3, generators=numbered(range(ROWS)))
        disturbed = draft.loss(batch, seen, **drawn).total
    assert not [n for n in done.names if any(word in n for word in RANDOM)]
    assert disturbed != draft.loss(batch, seen).total
    backwards = draft.prepare_batch(batch, step=3, generators=numbered(reversed(range(ROWS))))
    assert torch.equal(backwards["noise"], drawn["noise"].flip(0))
    short, long = LENGTH // 4, LENGTH - LENGTH // 4
    for noise, tokens in zip(drawn["noise"].split([short, long], 1), (short, long), strict=True):
        width = 0.5 * 512 / tokens  # of a uniform distribution around 0
        assert noise.abs().max() <= width / 2
        assert noise.std() == pytest.approx(width / 12**0.5, rel=0.05)


def test_the_host_reads_as_often_for_many_steps_as_for_few(target):
    """What is logged is read in one transfer; in a step AdamW reads its own count, on the host."""

    def reads(steps):
        conf = toy_conf(draft=CASES["medusa"].conf, optim={"steps": steps}, save_every=99)
        conf.data, conf.log.interval, conf.eval_every = DataConf(row_length=LENGTH), steps, 99
        draft = CASES["medusa"].build(target)
        with counted_reads() as read, Operations() as done:
            loop_over(conf, draft, target, CPU)
        counts = steps * sum(p.requires_grad for p in draft.parameters())
        scalars = sum(name == "_local_scalar_dense" for name in done.names)
        return len(read) - counts, scalars - counts

    assert reads(2) == reads(8)
