"""Rows are made ready while the step before is taken, and what is waited for is counted."""

import threading
import time
from contextlib import closing

import pytest

from train.rows.micro_batches import Prefetcher


def test_every_step_is_made_once_and_in_turn_by_a_thread_beside():
    made, here = [], threading.get_ident()
    with closing(
        Prefetcher(lambda n: made.append((n, threading.get_ident())) or n, steps=6, early=True)
    ) as ahead:
        assert [ahead.take(step) for step in range(2, 6)] == [2, 3, 4, 5]
    assert [number for number, _ in made] == [2, 3, 4, 5]
    assert [thread == here for _, thread in made] == [True, False, False, False]


def test_what_depends_on_the_step_before_is_made_when_it_is_taken():
    learned = 0
    with closing(Prefetcher(lambda _: learned, steps=3, early=False)) as ahead:
        for step in range(3):
            assert ahead.take(step) == learned
            learned += 1


def test_only_what_is_waited_for_counts():
    """Made in a tenth of a second: waited for by a step that takes none, not by a longer one."""
    with closing(Prefetcher(lambda _: time.sleep(0.1), steps=9, early=True)) as ahead:
        ahead.take(0)
        waited = []
        for step, seconds in enumerate((0.0, 0.5), start=1):
            time.sleep(seconds)
            ahead.wait_seconds = 0.0
            ahead.take(step)
            waited.append(ahead.wait_seconds)
    assert waited[0] > 0.05
    assert waited[1] < 0.02


def test_what_making_raises_reaches_the_step():
    def make(step):
        if step == 1:
            raise ValueError("torn")

    with closing(Prefetcher(make, steps=3, early=True)) as ahead:
        ahead.take(0)
        with pytest.raises(ValueError, match="torn"):
            ahead.take(1)
