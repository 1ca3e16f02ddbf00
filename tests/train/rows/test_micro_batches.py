"""The rows of a step are built while the step before is taken."""

import threading
from contextlib import closing

import pytest

from train.rows.micro_batches import build_ahead


def test_every_step_is_built_once_and_in_turn_by_another_thread():
    built, here = [], threading.get_ident()
    steps = build_ahead(lambda n: built.append((n, threading.get_ident())) or n, range(2, 6))
    assert list(steps) == [2, 3, 4, 5]
    assert [number for number, _ in built] == [2, 3, 4, 5]
    assert here not in {thread for _, thread in built}


def test_the_next_step_is_built_while_a_step_is_taken():
    begun = [threading.Event() for _ in range(3)]
    with closing(build_ahead(lambda n: begun[n].set(), range(3))) as steps:
        next(steps)
        assert begun[1].wait(timeout=300)
        assert not begun[2].is_set()


def test_an_error_reaches_the_step_that_it_concerns():
    def build(step: int) -> None:
        if step == 1:
            raise ValueError("torn")

    with closing(build_ahead(build, range(3))) as steps:
        next(steps)
        with pytest.raises(ValueError, match="torn"):
            next(steps)
