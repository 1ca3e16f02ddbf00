"""Rows are made ready while the step before is taken, and what is waited for is counted."""

import threading
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
    """An input takes a second: a step that asks for it at once waits, one that comes later not."""
    now, step = 0.0, 0
    begin, made = ([threading.Event() for _ in range(3)] for _ in range(2))

    def make(number: int) -> None:
        nonlocal now
        begin[number].wait()
        now += 1.0
        made[number].set()

    def clock() -> float:
        read = now
        begin[step].set()  # `take` reads the clock before it waits
        return read

    waited = []
    with closing(Prefetcher(make, steps=3, early=True, clock=clock)) as ahead:
        for step in range(3):
            if step == 2:  # its input is made while the step before is taken
                begin[step].set()
                made[step].wait()
            ahead.wait_seconds = 0.0
            ahead.take(step)
            waited.append(ahead.wait_seconds)
    assert waited == [1.0, 1.0, 0.0]


def test_what_making_raises_reaches_the_step():
    def make(step):
        if step == 1:
            raise ValueError("torn")

    with closing(Prefetcher(make, steps=3, early=True)) as ahead:
        ahead.take(0)
        with pytest.raises(ValueError, match="torn"):
            ahead.take(1)
