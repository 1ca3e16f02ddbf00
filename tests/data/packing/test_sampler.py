"""The order of the rows is a pure function of the step, for any number of processes."""

from itertools import chain

import pytest

from data.packing.sampler import RowOrder


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (10, 4), (3, 8)])
def test_every_epoch_visits_each_row_once(rows, batch_size):
    order = RowOrder(num_rows=rows, rows_per_step=batch_size, seed=3)
    batches = [order.step_rows(step) for step in range(3 * rows)]
    assert all(len(batch) == batch_size for batch in batches)
    visits = list(chain(*batches))
    epochs = [visits[start : start + rows] for start in range(0, len(visits), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_order_resumes_from_the_step_alone():
    batches = [RowOrder(num_rows=11, rows_per_step=4, seed=5).step_rows(step) for step in range(9)]
    assert RowOrder(num_rows=11, rows_per_step=4, seed=5).step_rows(8) == batches[8]
    assert [RowOrder(num_rows=11, rows_per_step=4, seed=6).step_rows(step) for step in range(9)] != batches


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_together_take_the_batch_of_a_single_process(world):
    order = RowOrder(num_rows=40, rows_per_step=12, seed=0)
    for step in range(5):
        shares = [order.step_rows(step, rank, world) for rank in range(world)]
        assert [len(share) for share in shares] == [12 // world] * world
        # Rows are dealt to the ranks in turn.
        assert list(chain(*zip(*shares, strict=True))) == order.step_rows(step)
    with pytest.raises(AssertionError):
        order.step_rows(0, 0, 5)
