"""A launcher's ten restarts after kills of a worker, some during a write, change no weight of a run."""

import logging
import random
from functools import partial
from pathlib import Path

import torch

from tests.support.commands.ports import find_free_port
from tests.support.runs.killing import kill_worker, launcher, newest_step, partials
from tests.support.runs.toy_run import metrics, weights

log = logging.getLogger(__name__)
PROCESSES, KILLS, HALF_WRITTEN, STEPS = 4, 10, 3, 300


def test_ten_killed_workers_leave_the_weights_of_an_unbroken_run(tmp_path):
    rng = random.Random(0)
    killed, changes = tmp_path / "killed", {"optim": {"steps": STEPS}}
    with launcher(killed, changes, processes=PROCESSES, restarts=KILLS) as run:
        for number, moment in enumerate(sorted(rng.sample(range(STEPS * 9 // 10), KILLS))):
            moment = max(moment, newest_step(killed))  # its workers run by then

            def is_due(moment: int = moment, writing: bool = number < HALF_WRITTEN) -> bool:
                return newest_step(killed) > moment and (not writing or bool(partials(killed)))

            kill_worker(run, rng.randrange(PROCESSES), when=is_due)
            log.info("kill %d of 10 after step %d", number + 1, newest_step(killed))
    assert_equals_unbroken_run(killed, changes)


def test_all_nodes_start_again_when_a_worker_of_one_dies(tmp_path):
    killed, changes = tmp_path / "killed", {"optim": {"steps": 60}}
    rendezvous = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint=localhost:{find_free_port()}")
    node = partial(
        launcher,
        killed,
        changes,
        processes=PROCESSES // 2,
        restarts=1,
        meeting=rendezvous,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    with node(node=0), node(node=1) as other:
        kill_worker(other, 0, when=lambda: newest_step(killed) >= 20)
    assert_equals_unbroken_run(killed, changes)


def assert_equals_unbroken_run(killed: Path, changes: dict):
    """Check that the weights are those of an unbroken run bit for bit, and every step is logged once."""
    unbroken = killed.with_name("unbroken")
    with launcher(unbroken, changes, processes=PROCESSES, restarts=0):
        pass
    ours, theirs = weights(killed), weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["step"] for line in metrics(killed)] == [line["step"] for line in metrics(unbroken)]
