"""The chunked form of the losses has the plain form's value and gradient, in chunks and over processes."""

from functools import partial

import pytest
import torch
from torch import nn

from models.batch import Batch
from models.device.device import Device
from models.losses.chunked import chunked_distillation_loss, evaluate_chunk
from models.losses.config import LossConf, LossName, Reduction
from models.losses.loss_weights import token_weights
from tests.support.models.loss_cases import (
    DRAFT_IDS,
    assert_all_close,
    build_conf,
    differentiate,
    differentiate_both,
    distillation_loss,
    draw_inputs,
    each_loss,
    each_steps,
    each_vocabulary,
)
from tests.support.models.watching import LargestTensor


@each_loss
@each_steps
@pytest.mark.parametrize("share", [0, 1, 2])
def test_rows_without_weight_change_neither_loss_nor_gradient(name, steps, share):
    """No row, most rows or half of the rows have no weight; they are skipped where skipping costs nothing."""
    args = draw_inputs(steps=steps, draft_ids=None)
    tokens = torch.arange(args["weight"].shape[-1])
    args["weight"] = args["weight"] * (tokens % 2 < share) * (share == 2 or tokens > 2)
    plain, chunked = differentiate_both(args, build_conf(name))
    assert_all_close(chunked, plain)


@each_loss
@each_vocabulary
@each_steps
@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_chunks_change_neither_value_nor_gradient(name, draft_ids, steps, chunk):
    args = draw_inputs(steps=steps, draft_ids=draft_ids)
    plain, chunked = differentiate_both(args, build_conf(name, logits_chunk=chunk))
    assert_all_close(chunked, plain)


@pytest.mark.parametrize("chunk", [1, 8, 1024])
def test_each_step_may_have_a_head_of_its_own(chunk):
    """The second head is a view of a larger matrix, the third has no gradient."""
    args = draw_inputs(steps=(3,))
    matrix = torch.randn(15, 6).requires_grad_()
    args["draft_heads"] += [matrix[:11], torch.randn(11, 6)]
    results = []
    for form in (distillation_loss, chunked_distillation_loss):
        total, _ = form(**args, conf=LossConf(logits_chunk=chunk))
        learns = [args["draft_hidden"], args["draft_heads"][0], matrix]
        results.append([total, *torch.autograd.grad(total, learns)])
    assert all(grad.any() for grad in results[0])
    assert_all_close(*results)


@pytest.mark.parametrize("evaluate", [evaluate_chunk, partial(evaluate_chunk)], ids=["eager", "compiled"])
def test_the_targets_logits_are_computed_once_for_all_steps(evaluate):
    """What a compiler made of `evaluate_chunk` gets chunks of one size."""
    head, rows = nn.Linear(5, 11), []
    head.register_forward_hook(lambda _, seen, __: rows.append(len(seen[0])))
    args = draw_inputs(steps=(3,), own_heads=True) | {"target_head": head}
    args["weight"] = args["weight"] + 0.1
    chunked_distillation_loss(**args, conf=LossConf(logits_chunk=12), evaluate=evaluate)
    assert rows == [4] * 5 + [3 if evaluate is evaluate_chunk else 4]  # 23 tokens


def test_uncovered_rows_have_no_gradient_and_count_as_misses():
    args = draw_inputs(draft_ids=torch.tensor([0, 1]))
    args["target_head"] = torch.zeros(11, 5)
    args["target_head"][4, 0], args["target_hidden_or_topk"][:, 0] = 1.0, 9.0  # token 4, always
    total, metrics = chunked_distillation_loss(**args, conf=LossConf(logits_chunk=4))
    (grad,) = torch.autograd.grad(total, args["draft_hidden"])
    assert total == 0
    assert not grad.any()
    assert metrics["hit"].tolist() == [0, (args["weight"] != 0).sum()]
    assert metrics["covered"][0] == 0


def test_a_head_may_be_a_module_with_bias():
    args, head = draw_inputs(), nn.Linear(5, 11)
    plain, chunked = differentiate_both(args | {"target_head": head}, LossConf(logits_chunk=4))
    assert_all_close(chunked, plain)
    assert head.weight.grad is None


@each_loss
def test_bf16_autocast_keeps_the_softmax_in_fp32(name):
    args = draw_inputs(steps=(2,))
    plain = differentiate(distillation_loss, args, build_conf(name))
    with torch.autocast("cpu", torch.bfloat16):
        chunked = differentiate(chunked_distillation_loss, args, build_conf(name))
    assert all(tensor.dtype == torch.float32 for tensor in chunked)
    assert_all_close(chunked[:3], plain[:3], atol=0.02, rtol=0.02)


@pytest.mark.no_shapes
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "bias"), [(LossName.lk_hybrid, True), *((name, False) for name in LossName)])
@each_steps
def test_all_chunks_share_a_compiled_graph(name, bias, steps):
    """Two batches, whose numbers of counted tokens differ, and one without any; the last chunk is padded."""
    args = draw_inputs(draft_ids=DRAFT_IDS, steps=steps, own_heads=bool(steps))
    conf = LossConf(name=name, logits_chunk=6, temperature=0.7, top_k=2)
    if bias:
        args["target_head"] = nn.Linear(5, 11).requires_grad_(False)
    before = Device.count_graphs()
    compiled = torch.compile(evaluate_chunk, backend="aot_eager", fullgraph=True, dynamic=False)
    form = partial(chunked_distillation_loss, evaluate=compiled)
    for share in (1, 0.5, 0):
        args["weight"][..., int(share * 23) :] = 0
        assert_all_close(differentiate(form, args, conf), differentiate(chunked_distillation_loss, args, conf))
    assert Device.count_graphs() == before + 1


@each_loss
@pytest.mark.parametrize("steps", [(), (4,)], ids=["flat", "steps"])
def test_chunks_never_hold_tokens_by_vocabulary(name, steps):
    tokens, vocab, chunk = 256, 500, 32
    args = draw_inputs(tokens=tokens, vocab=vocab, steps=steps)
    numel = {}
    for form in (distillation_loss, chunked_distillation_loss):
        with LargestTensor() as largest:
            form(**args, conf=build_conf(name, logits_chunk=chunk))[0].backward()
        numel[form] = largest.numel
    assert numel[distillation_loss] >= tokens * vocab
    assert numel[chunked_distillation_loss] <= chunk * vocab


# --- rows in parts ---------------------------------------------------------------------------


def sum_over_rows(rows, conf):
    """Return loss, weight and gradients, summed over some rows of a text."""
    length = 6
    text = torch.arange(4 * length).reshape(4, length)
    answer, document = text % length > text // length, torch.zeros_like(text)
    args = draw_inputs(tokens=4 * length, draft_ids=DRAFT_IDS)
    ids = text[rows]
    batch = Batch(input_ids=ids, answer_mask=answer[rows], document_ids=document[rows], positions=ids)
    weight, denominator = token_weights(batch, conf=conf)
    mine = ids.flatten()
    for key in ("target_hidden_or_topk", "labels"):
        args[key] = args[key][mine]
    hidden, (head,) = args["draft_hidden"], args["draft_heads"]
    total, _ = chunked_distillation_loss(**args | {"draft_hidden": hidden[mine], "weight": weight.flatten()}, conf=conf)
    return [total.detach(), denominator, *torch.autograd.grad(total, [hidden, head])]


def list_settings():
    for name in LossName:
        for reduction in Reduction:
            yield build_conf(name, reduction=reduction)


def test_two_halves_of_the_rows_add_up_to_the_gradient_of_all():
    """Loss and weight are sums, so that answers of unequal lengths keep their weights when processes split them."""
    for conf in list_settings():
        expected = sum_over_rows(slice(None), conf)
        halves = (sum_over_rows(slice(start, None, 2), conf) for start in range(2))
        assert expected[0] > 0
        assert expected[-1].any()
        assert_all_close([sum(pair) for pair in zip(*halves, strict=True)], expected)
