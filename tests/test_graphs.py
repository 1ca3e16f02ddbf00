"""Graphs are announced before a run and counted while it runs; one more is an error."""

from dataclasses import replace

import pytest
import torch

from models.graphs import Graph, Ledger, UnannouncedError
from tests.tiny import CPU

NUMBERS = {"factor": 3.0}


def tripled(ids):
    return ids * NUMBERS["factor"]


def counting(backend: str = ""):
    """A device that compiles with a backend that lowers to nothing, or looks at shapes alone."""
    return replace(CPU, compiles=bool(backend), counts=True, backend=backend, ledger=Ledger())


@pytest.mark.parametrize("backend", ["", "eager"])
def test_a_shape_more_than_announced_is_refused_before_it_is_compiled(backend):
    device, five = counting(backend), torch.zeros(5)

    def raised(ids, layers):
        return ids.add_(len(layers))

    ours = device.compile(raised, kind="demo")
    with device.ledger.expecting([Graph("raised:demo")]) as run:
        ours(torch.ones(4), [1, 3])
        ours(torch.zeros(4), [1, 3])
        with pytest.raises(UnannouncedError) as refused:
            ours(five, [1, 3])
        with pytest.raises(UnannouncedError, match=r"one more: layers \[1, 2\]"):
            ours(torch.ones(4), [1, 2])
        assert run.compiled == {"raised:demo": 1}
    assert not five.any()
    told = "graphs: raised:demo has 1 announced, got one more: ids [5] float32"
    assert str(refused.value) == told
    ours(torch.ones(6), [1, 3])  # outside of a run nothing is held against anything


def test_a_function_that_nobody_announced_is_refused():
    device = counting()
    ours = device.compile(tripled)
    with (
        device.ledger.expecting([]),
        pytest.raises(UnannouncedError, match="graphs: tripled has 0 announced, got one more"),
    ):
        ours(torch.ones(2))


def test_a_shape_that_is_compiled_again_is_one_more_and_said_to_be_so(monkeypatch):
    device = counting("eager")
    ours = device.compile(tripled)
    with device.ledger.expecting([Graph("tripled")]) as run:
        ours(torch.ones(7))
        monkeypatch.setitem(NUMBERS, "factor", 4.0)
        with pytest.raises(UnannouncedError, match=r"same shape again.*: ids \[7\] float32"):
            ours(torch.ones(7))
    assert run.compiled == {"tripled": 2}


def test_what_is_compiled_outside_of_the_warm_up_is_late():
    device = counting()
    ours = device.compile(tripled)
    with device.ledger.expecting([Graph("tripled", (size,)) for size in (4, 5)]) as run:
        with device.ledger.warming():
            ours(torch.ones(4))
        assert run.late == 0
        ours(torch.ones(4))
        ours(torch.ones(5))
    assert (run.late, run.compiled.total()) == (1, 2)
