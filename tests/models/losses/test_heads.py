"""Processes that split the heads of a loss compute what a process with whole heads does."""

import pytest
import torch

from models.losses.chunked import chunked_distillation_loss
from tests.support.models.loss_cases import assert_all_close, build_conf
from tests.support.models.split_heads import CASES, PROCESSES, draw_case
from tests.support.runs import launch_script

pytestmark = pytest.mark.system
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    launch_script("../models/split_heads.py", folder, processes=PROCESSES)
    return folder


def read_group(folder, size):
    """Return the results of each process of the first group of `size`."""
    return [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]


def name_case(case):
    name, draft_ids, own_heads = CASES[case]
    return f"{name.value}-{'full' if draft_ids is None else 'reduced'}-{'own heads' if own_heads else 'a head'}"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", range(len(CASES)), ids=name_case)
def test_split_heads_change_neither_value_nor_gradient(folder, case, size):
    """Four processes hold 3, 3, 3 and 2 rows of the full vocabulary, and 2, 2, 1 and 0 of the reduced one."""
    name, draft_ids, own_heads = CASES[case]
    inputs = draw_case(draft_ids, own_heads)
    total, metrics = chunked_distillation_loss(**inputs, conf=build_conf(name))
    hidden_grad, *head_grads = torch.autograd.grad(total, [inputs["draft_hidden"], *inputs["draft_heads"]])
    assert all(grad.any() for grad in (hidden_grad, *head_grads))
    totals, other_metrics, hidden_grads, other_grads = zip(
        *(results["cases"][case] for results in read_group(folder, size)), strict=True
    )
    assert_all_close([sum(totals), torch.cat(hidden_grads, -2)], [total.detach(), hidden_grad], **CLOSE)
    for key, pairs in metrics.items():
        torch.testing.assert_close(sum(own[key] for own in other_metrics), pairs, **CLOSE)
    for grads in other_grads:  # means over the processes, as FSDP2 gives them of other weights
        assert_all_close([size * grad for grad in grads], head_grads, **CLOSE)


@pytest.mark.parametrize("size", [2, 4])
def test_a_chunk_takes_four_collectives_and_its_backward_pass_none(folder, size):
    for results in read_group(folder, size):
        assert results["collectives"] == {
            "c10d_functional.all_gather_into_tensor": 2,
            "c10d_functional.all_to_all_single": 6,
        }
