"""Ten kills at random moments, at least three of them while something is half written."""

import random

import pytest
import torch
from killing import finish, kill, newest_step, partials
from toy_run import metrics, toy_conf, toy_run, weights

KILLS, HALF_WRITTEN, STEPS = 10, 3, 600


@pytest.mark.slow
def test_ten_kills_end_in_the_weights_of_an_unbroken_run(tmp_path):
    rng = random.Random(0)
    killed, changes = tmp_path / "killed", {"optim": {"steps": STEPS}}
    half_written = 0
    moments = sorted(rng.sample(range(STEPS * 9 // 10), KILLS))
    for number, moment in enumerate(moments):

        def due(moment: int = moment) -> bool:
            return newest_step(killed) >= moment

        if KILLS - number <= 2 * (HALF_WRITTEN - half_written):
            half_written += kill(killed, changes, when=lambda: due() and bool(partials(killed)))
        else:
            half_written += kill(killed, changes, when=due)
        print(f"kill {number + 1}: after the state of step {newest_step(killed)}, {half_written=}")
    finish(killed, changes)
    assert half_written >= HALF_WRITTEN

    whole = tmp_path / "whole"
    toy_run(whole, toy_conf(**changes))
    ours, theirs = weights(killed), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["step"] for line in metrics(killed)] == [line["step"] for line in metrics(whole)]
