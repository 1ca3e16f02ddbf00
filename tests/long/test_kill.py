"""Ten kills at random moments, at least three of them during a write, change no weight of a run."""

import logging
import random

import torch

from tests.support.runs.killing import finish, kill, kill_while_saving, newest_step
from tests.support.runs.toy_run import metrics, toy_conf, toy_run, weights

log = logging.getLogger(__name__)
KILLS, HALF_WRITTEN, STEPS = 10, 3, 600
SAVE_EVERY = toy_conf().interval.save


def test_ten_kills_end_in_the_weights_of_an_unbroken_run(tmp_path):
    rng = random.Random(0)
    killed, changes = tmp_path / "killed", {"optim": {"steps": STEPS}}
    half_written = 0
    moments = sorted(rng.sample(range(STEPS * 9 // 10), KILLS))
    for number, moment in enumerate(moments):

        def is_due(moment: int = moment) -> bool:
            return newest_step(killed) >= moment

        if KILLS - number <= 2 * (HALF_WRITTEN - half_written):
            step = max(moment, newest_step(killed)) // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY
            kill_while_saving(killed, changes, step=step)
            half_written += 1
        else:
            half_written += kill(killed, changes, when=is_due)
        log.info("kill %d, saved step %d, half written %d", number + 1, newest_step(killed), half_written)
    finish(killed, changes)
    assert half_written >= HALF_WRITTEN

    unbroken = tmp_path / "unbroken"
    toy_run(unbroken, toy_conf(**changes))
    ours, theirs = weights(killed), weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["step"] for line in metrics(killed)] == [line["step"] for line in metrics(unbroken)]
