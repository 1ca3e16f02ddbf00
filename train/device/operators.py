"""Third stage: operators alone, compiled, beside the CPU.

Some are needed by our graphs. The others were found to be missing or wrong on some device, and our graphs avoid them;
whether this device has them is worth knowing, so their failure counts as ABSENT.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from models.device.device import Device
from models.operators import DROPPED_SCORE, drop_tail, gather_mask, mark_tokens, stable_topk, topk_rows
from models.trees.keyed_noise import gumbel_noise, split_row_ids, uniform_noise
from train.device.checks import Check, CheckContext, CheckFailedError

VOCABULARIES = (32_000, 151_936)
COUNTS = (1, 4, 16, 64)  # of the likeliest tokens; a stored teacher has 64
ROWS, SLOTS, WIDTH = 5, 64, 64
NEEDED = "a graph of ours has this operator: report the error to the compiler's authors, with this page"
NOISE = "device.name: decode at temperature 0 there, as noise must have the same bits on every device"
TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}


def list_checks(context: CheckContext) -> Iterator[Check]:
    check = partial(build_check, context.device)
    yield from list_needed(check)
    for avoided in list_avoided(check):
        yield replace(avoided, name=f"(not needed) {avoided.name}", is_needed=False)


def build_check(
    device: Device, name: str, function: Callable[..., Any], *inputs: Any, is_exact: bool = False, remedy: str = NEEDED
) -> Check:
    """Build the check of a function; integers must be equal, other results close unless `is_exact`.

    Gradients are compared too, for the arguments that require one.
    """
    run = partial(compare_with_cpu, device, function, inputs, is_exact=is_exact)
    return Check(name=name, run=run, remedy=remedy)


def compare_with_cpu(device: Device, function: Callable[..., Any], inputs: tuple[Any, ...], *, is_exact: bool) -> str:
    """Compute a function compiled on the device and eagerly on the CPU; raise CheckFailedError if they disagree."""
    expected = _compute(function, [_copy(value) for value in inputs])
    arguments = [_copy(value, device.torch_device) for value in inputs]
    addresses = _list_addresses(arguments)
    actual = _compute(device.compile(function), arguments)
    device.synchronize()
    if _list_addresses(arguments) != addresses:
        raise CheckFailedError("a tensor that is written in place has moved")
    return compare_results(actual, expected, is_exact=is_exact)


def _compute(function: Callable[..., Any], arguments: list[Any]) -> list[Tensor]:
    """Return the results of a function, the tensors among its arguments, and gradients."""
    results = tree_leaves(function(*arguments))
    leaves = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    if leaves:
        results += torch.autograd.grad(results[0].square().sum(), leaves)  # of size 1, unlike a mean's
    return results + [value for value in arguments if isinstance(value, Tensor)]


def _list_addresses(arguments: list[Any]) -> list[int]:
    return [value.data_ptr() for value in arguments if isinstance(value, Tensor)]


def _copy(value: Any, torch_device: torch.device | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().to(torch_device or value.device).requires_grad_(value.requires_grad)


def compare_results(actual: list[Tensor], expected: list[Tensor], *, is_exact: bool = False) -> str:
    """Return the largest difference of results; raise CheckFailedError if integers differ or numbers are far apart."""
    worst = 0.0
    for got, right in zip(actual, expected, strict=True):
        got, right = got.detach().cpu(), right.detach()
        if got.shape != right.shape or got.dtype != right.dtype:
            raise CheckFailedError(
                f"{got.dtype} of {tuple(got.shape)} in place of {right.dtype} of {tuple(right.shape)}"
            )
        if is_exact or not got.dtype.is_floating_point:
            if wrong := int((got != right).sum()):
                raise CheckFailedError(f"{wrong} of {right.numel()} values differ")
            continue
        if not torch.allclose(got, right, equal_nan=True, **TOLERANCE):
            raise CheckFailedError(f"differs by up to {(got - right).abs().max():.3g}")
        if right.numel() and right.isfinite().all():
            worst = max(worst, float((got - right).abs().max()))
    return f"differs by up to {worst:.1g}" if worst else "equal"


def list_needed(check: Callable[..., Check]) -> Iterator[Check]:
    """Yield the checks of operators that graphs of training and decoding have."""
    numbers = torch.Generator().manual_seed(0)
    row_limbs, places = split_row_ids([3, 2**40]), torch.arange(4).expand(2, 4).contiguous()
    for vocab in VOCABULARIES:
        scores = 4 * torch.randn(ROWS, vocab, generator=numbers)
        ids = torch.randint(vocab, (1, SLOTS), generator=numbers)
        vocab_ids, note = torch.arange(vocab), f", {vocab:,} columns"
        for count in COUNTS:
            yield check(f"topk_rows of {count}{note}", topk_rows, scores, count)
        yield check(f"argmax{note}", _argmax, scores)
        yield check(f"log-softmax{note}", lambda s: s.log_softmax(-1), scores)
        yield check(f"top-p without a sort{note}", lambda s: drop_tail(s, 0.1) > DROPPED_SCORE, scores)
        yield check(f"tokens that occur{note}", mark_tokens, ids, ids % 2 == 0, vocab)
        yield check(f"noise{note}", gumbel_noise, 7, row_limbs, 11, places, vocab_ids, remedy=NOISE)
    yield check("bits of noise", uniform_noise, 7, row_limbs, 11, places, is_exact=True, remedy=NOISE)
    query, key, value = torch.randn(3, 2, 4, SLOTS, WIDTH, generator=numbers).unbind()
    mask = torch.arange(SLOTS)[:, None] >= torch.arange(SLOTS)
    yield check("attention with a mask", _attend, query, key, value, mask)
    leaves = tuple(tensor.clone().requires_grad_() for tensor in (query, key, value))
    yield check("attention with a mask, gradient", _attend, *leaves, mask)
    table = torch.randn(1000, WIDTH, generator=numbers).requires_grad_()
    ids = torch.randint(1000, (2, SLOTS), generator=numbers)
    yield check("embedding, gradient", _embed, table, ids)
    cache, slots = torch.zeros(ROWS, SLOTS, WIDTH), torch.tensor([3, 1, 4, 0, 5])
    update = torch.randn(ROWS, WIDTH, generator=numbers)
    yield check("write into a cache in place", _write_slots, cache, slots, update)
    yield check("sum of integers", lambda i: i.sum(-1), ids)
    ties = (4 * torch.randn(ROWS, SLOTS, generator=numbers)).round()
    yield check("stable_topk of 16", stable_topk, ties, 16)
    yield check("gather of a mask", gather_mask, ties > 0, 1, ids[:, :ROWS].T % SLOTS)
    yield check("gather", lambda v, i: v.gather(1, i), update, ids[:1, :ROWS].T % WIDTH)


def list_avoided(check: Callable[..., Check]) -> Iterator[Check]:
    """Yield the checks of operators that some compilers lack or compute wrongly, so that our graphs avoid them."""
    numbers = torch.Generator().manual_seed(1)
    small = torch.randn(2, 3, 40, generator=numbers)
    ids = torch.arange(12).view(3, 4)
    for vocab in VOCABULARIES:
        scores, note = torch.randn(ROWS, vocab, generator=numbers), f", {vocab:,} columns"
        for count in COUNTS:
            yield check(f"topk of {count}{note}", lambda s, count=count: s.topk(count), scores)
        yield check(f"sort{note}", lambda s: s.sort(dim=-1).values, scores)
        yield check(f"cumsum{note}", lambda s: s.softmax(-1).cumsum(-1), scores)
    yield check("stable sort", lambda s: s.sort(dim=-1, stable=True, descending=True), (4 * small).round())
    yield check("topk of three axes", lambda s: s.topk(4).values, small)
    yield check("tril", lambda s: s.tril(), small)
    yield check("remainder of integers", lambda i: i % 3, ids)
    yield check("argmax of integers", lambda i: i.argmax(1), ids)
    yield check("shift of 64 bits", lambda i: (i << 40) >> 3, ids)
    yield check("product of 64 bits", lambda i: i * 0x9E3779B97F4A7C15 % 2**31, ids[:, :1])
    yield check("scatter_add of integers", lambda i: torch.zeros_like(i).scatter_add(1, i % 4, i), ids)
    yield check("gather of bools", lambda i: (i > 5).gather(1, i % 4), ids)
    yield check("size zero", lambda s: (s[..., :0], s + 1), small)
    yield check("masked_fill with -inf", lambda s: s.masked_fill(s > 0, -torch.inf).exp(), small)
    yield check("softmax of a row of -inf", lambda s: s.masked_fill(s > -99, -torch.inf).softmax(-1), small)
    yield check("float64", lambda s: s.double().cumsum(-1).float(), small)


def _argmax(scores: Tensor) -> Tensor:
    return scores.argmax(-1)


def _embed(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _write_slots(cache: Tensor, slots: Tensor, update: Tensor) -> Tensor:
    cache[torch.arange(len(slots), device=slots.device), slots] = update
    return cache.sum(-1)
