"""The chunked form of the losses: the plain form's value and gradient, in chunks and processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.losses.chunked import chunked_distillation_loss
from models.losses.config import LossConf, LossName, Reduction
from models.losses.loss_weights import token_weights
from tests.support.models.loss_cases import (
    KEPT,
    all_close,
    both,
    conf_of,
    distillation_loss,
    each_loss,
    each_steps,
    each_vocabulary,
    inputs,
    learned,
)


@each_loss
@each_steps
@pytest.mark.parametrize("share", [0, 1, 2])
def test_rows_without_weight_teach_nothing(name, steps, share):
    """They are left out where that is free; half of them, all but few, or all."""
    args = inputs(steps=steps, kept=None)
    tokens = torch.arange(args["weight"].shape[-1])
    args["weight"] = args["weight"] * (tokens % 2 < share) * (share == 2 or tokens > 2)
    plain, chunked = both(args, conf_of(name))
    all_close(chunked, plain)


@each_loss
@each_vocabulary
@each_steps
@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_chunks_change_neither_value_nor_gradient(name, kept, steps, chunk):
    args = inputs(steps=steps, kept=kept)
    plain, chunked = both(args, conf_of(name, logits_chunk=chunk))
    all_close(chunked, plain)


@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_each_step_may_have_a_head_of_its_own(chunk):
    """One of them a view of a larger matrix, one without gradient."""
    args = inputs(steps=(3,))
    whole = torch.randn(15, 6).requires_grad_()
    args["draft_heads"] += [whole[:11], torch.randn(11, 6)]
    results = []
    for form in (distillation_loss, chunked_distillation_loss):
        total, _ = form(**args, conf=LossConf(logits_chunk=chunk))
        learns = [args["draft_hidden"], args["draft_heads"][0], whole]
        results.append([total, *torch.autograd.grad(total, learns)])
    assert all(grad.any() for grad in results[0])
    all_close(*results)


def test_the_targets_logits_are_computed_once_for_all_steps():
    head, rows = nn.Linear(5, 11), []
    head.register_forward_hook(lambda _, seen, __: rows.append(len(seen[0])))
    args = inputs(steps=(3,), own_heads=True) | {"target_head": head}
    args["weight"] = args["weight"] + 0.1
    chunked_distillation_loss(**args, conf=LossConf(logits_chunk=12))
    assert rows == [4] * 6  # 23 tokens


def test_uncovered_rows_teach_nothing_and_count_as_misses():
    kept = torch.tensor([0, 1])
    args = inputs(kept=kept)
    args["target_head"] = torch.zeros(11, 5)
    args["target_head"][4, 0], args["target_hidden_or_topk"][:, 0] = 1.0, 9.0  # token 4, always
    total, metrics = chunked_distillation_loss(**args, conf=LossConf(logits_chunk=4))
    (grad,) = torch.autograd.grad(total, args["draft_hidden"])
    assert total == 0
    assert not grad.any()
    assert metrics["hit"].tolist() == [0, (args["weight"] != 0).sum()]
    assert metrics["covered"][0] == 0


def test_a_head_may_be_a_module_with_bias():
    args, head = inputs(), nn.Linear(5, 11)
    plain, chunked = both(args | {"target_head": head}, LossConf(logits_chunk=4))
    all_close(chunked, plain)
    assert head.weight.grad is None


@each_loss
def test_bf16_autocast_keeps_the_softmax_in_fp32(name):
    args = inputs(steps=(2,))
    plain = learned(distillation_loss, args, conf_of(name))
    with torch.autocast("cpu", torch.bfloat16):
        chunked = learned(chunked_distillation_loss, args, conf_of(name))
    assert all(tensor.dtype == torch.float32 for tensor in chunked)
    all_close(chunked[:3], plain[:3], atol=0.02, rtol=0.02)


@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "bias"), [(LossName.lk_hybrid, True), *((name, False) for name in LossName)])
def test_compiles_into_one_graph(name, bias):
    args = inputs(kept=KEPT, steps=(2,), own_heads=True)
    conf = LossConf(name=name, logits_chunk=16, temperature=0.7, top_k=2)
    if bias:
        args["target_head"] = nn.Linear(5, 11).requires_grad_(False)
    compiled = torch.compile(chunked_distillation_loss, backend="aot_eager", fullgraph=True)
    results = []
    for form in (chunked_distillation_loss, compiled):
        total, _ = form(**args, conf=conf)
        results.append([total, *torch.autograd.grad(total, [args["draft_hidden"]])])
    all_close(*results)


class Largest(TorchDispatchMode):
    """Remembers the most elements any operator has returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@each_loss
@pytest.mark.parametrize("steps", [(), (4,)], ids=["flat", "steps"])
def test_chunks_never_hold_tokens_by_vocabulary(name, steps):
    tokens, vocab, chunk = 256, 500, 32
    args = inputs(tokens=tokens, vocab=vocab, steps=steps)
    numel = {}
    for form in (distillation_loss, chunked_distillation_loss):
        with Largest() as largest:
            form(**args, conf=conf_of(name, logits_chunk=chunk))[0].backward()
        numel[form] = largest.numel
    assert numel[distillation_loss] >= tokens * vocab
    assert numel[chunked_distillation_loss] <= chunk * vocab


# --- several processes ------------------------------------------------------------------------


def summed(rows, conf):
    """Sums over some rows of one text: the loss, its weight, and the gradients."""
    length = 6
    text = torch.arange(4 * length).reshape(4, length)
    answer, document = text % length > text // length, torch.zeros_like(text)
    args = inputs(tokens=4 * length, kept=KEPT)
    weight, denominator = token_weights(answer[rows], document[rows], conf=conf)
    mine = text[rows].flatten()
    for key in ("target_hidden_or_topk", "labels"):
        args[key] = args[key][mine]
    hidden, (head,) = args["draft_hidden"], args["draft_heads"]
    total, _ = chunked_distillation_loss(**args | {"draft_hidden": hidden[mine], "weight": weight.flatten()}, conf=conf)
    return [total.detach(), denominator, *torch.autograd.grad(total, [hidden, head])]


def settings():
    for name in LossName:
        for reduction in Reduction:
            yield conf_of(name, reduction=reduction, half_life=2)


def work(rank, folder):
    """One of two processes: every second row, and the sum over both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    results = [summed(slice(rank, None, 2), conf) for conf in settings()]
    for tensor in tree_leaves(results):
        dist.all_reduce(tensor)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one(tmp_path):
    """Loss and weight are sums: unequal answers, split over processes, weigh what they weighed."""
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=2)
    for conf, found in zip(settings(), torch.load(tmp_path / "results.pt"), strict=True):
        alone = summed(slice(None), conf)
        assert alone[0] > 0
        assert alone[-1].any()
        all_close(found, alone)
