"""A launcher's ten restarts: a worker killed at a random moment, in the middle of writing too."""

import logging
import random

import torch

from tests.killing import kill_worker, launcher, newest_step, partials
from tests.toy_run import metrics, weights

log = logging.getLogger(__name__)
PROCESSES, KILLS, HALF_WRITTEN, STEPS = 4, 10, 3, 300


def test_ten_killed_workers_leave_the_weights_of_an_unbroken_run(tmp_path):
    rng = random.Random(0)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    changes = {"optim": {"steps": STEPS}}
    with launcher(killed, changes, processes=PROCESSES, restarts=KILLS) as run:
        for number, moment in enumerate(sorted(rng.sample(range(STEPS * 9 // 10), KILLS))):
            moment = max(moment, newest_step(killed))  # else its workers might not be there yet

            def due(moment: int = moment, writing: bool = number < HALF_WRITTEN) -> bool:
                return newest_step(killed) > moment and (not writing or bool(partials(killed)))

            kill_worker(run, rng.randrange(PROCESSES), when=due)
            log.info("kill %d of 10 after step %d", number + 1, newest_step(killed))
    with launcher(whole, changes, processes=PROCESSES, restarts=0):
        pass
    ours, theirs = weights(killed), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["step"] for line in metrics(killed)] == [line["step"] for line in metrics(whole)]
