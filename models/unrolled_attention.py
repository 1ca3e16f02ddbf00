"""Attention of the training-time test (EAGLE-3, arXiv 2503.01840), exact and without T x T memory.

Axes: B rows, H query heads, K key-value heads, G = H / K heads a group, T positions, D head size.

A query attends to the step-0 keys that a mask allows and, in each later step, only to the key at
its own position. Step 0 is an ordinary masked attention with output O0 and log-sum-exp L0; own
keys have scores b_n. With L the log-sum-exp of all of them, the output is

    O = exp(L0 - L) O0 + sum_n exp(b_n - L) v_n

A key of share p and value v has the score gradient p (dO . v - M), with M = dO . O (`mean`), so the backward
pass of step 0 is that of an ordinary attention which is given the merged O and L. Merging by
autograd would give wrong gradients: log-sum-exps of a kernel have none of their own.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from models.layers import spread_heads
from models.targets.attention import CHUNK, KERNEL_DEVICES, attention_bias


def attend_unrolled(
    query: Float[Tensor, "b h t d"],
    keys: list[Float[Tensor, "b kv t d"]],
    values: list[Float[Tensor, "b kv t d"]],
    mask: Bool[Tensor, "b 1 t t"],
) -> Float[Tensor, "b h t d"]:
    """Return the attention of one step, given the keys and values of all steps so far.

    `mask` is causal and allows each query at least one key of step 0.
    """
    return UnrolledAttention.apply(query, mask, *keys, *values)


class UnrolledAttention(torch.autograd.Function):
    """The function of the module's head, whose memory grows linearly with T."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, mask: Tensor, *keys_and_values: Tensor) -> Tensor:
        steps = len(keys_and_values) // 2
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        out_BHTD, lse_BHT = attend_first(query, keys[0], values[0], mask)
        if steps > 1:
            own_BHTN = torch.stack([score_own_keys(query, key) for key in keys[1:]], -1)
            merged_BHT = torch.cat([lse_BHT[..., None], own_BHTN], -1).logsumexp(-1)
            shares_BHTN = (own_BHTN - merged_BHT[..., None]).exp().to(query.dtype)
            out_BHTD = out_BHTD * (lse_BHT - merged_BHT).exp().to(query.dtype)[..., None]
            for n, value in enumerate(values[1:]):
                out_BHTD = out_BHTD + shares_BHTN[..., n : n + 1] * spread_heads(value, query)
            lse_BHT = merged_BHT
        ctx.save_for_backward(query, mask, out_BHTD, lse_BHT, *keys_and_values)
        return out_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, mask, out_BHTD, lse_BHT, *keys_and_values = ctx.saved_tensors
        steps = len(keys_and_values) // 2
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        grad_query, grad_key, grad_value = differentiate_first(
            grad_BHTD, query, keys[0], values[0], mask, out_BHTD, lse_BHT
        )
        key_grads, value_grads = [grad_key], [grad_value]
        mean_BHT = (grad_BHTD.to(lse_BHT.dtype) * out_BHTD).sum(-1)
        scale = query.shape[-1] ** -0.5
        for key, value in zip(keys[1:], values[1:], strict=True):
            share_BHT = (score_own_keys(query, key) - lse_BHT).exp()
            along_BHT = (grad_BHTD * spread_heads(value, query)).sum(-1)
            grad_score_BHT = share_BHT * (along_BHT - mean_BHT) * scale
            grad_score_BHT1 = grad_score_BHT.to(query.dtype)[..., None]
            grad_query = grad_query + grad_score_BHT1 * spread_heads(key, query)
            key_grads.append(sum_heads(grad_score_BHT1 * query, key))
            value_grads.append(sum_heads(share_BHT.to(query.dtype)[..., None] * grad_BHTD, value))
        return grad_query, None, *key_grads, *value_grads


def sum_heads(x: Float[Tensor, "b h t d"], key: Tensor) -> Float[Tensor, "b kv t d"]:
    """Sum over the query heads of each key-value head's group."""
    return x.unflatten(1, (key.shape[1], -1)).sum(2)


def score_own_keys(query: Float[Tensor, "b h t d"], key: Float[Tensor, "b kv t d"]) -> Float[Tensor, "b h t"]:
    """Return each query's score of the key at its own position, multiplied in their type, in fp32 at least."""
    scores = (query * spread_heads(key, query)).sum(-1) * query.shape[-1] ** -0.5
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


# --- step 0: PyTorch's kernel on CPUs, chunks of queries elsewhere --------------------------------


def attend_first(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """Return the output and the log-sum-exp of an ordinary masked attention."""
    if query.device.type not in KERNEL_DEVICES:
        return attend_in_chunks(query, key, value, mask)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, spread_heads(key, query), spread_heads(value, query), attn_mask=attention_bias(mask, query.dtype)
    )


def differentiate_first(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given the merged output and log-sum-exp."""
    if query.device.type not in KERNEL_DEVICES:
        return differentiate_in_chunks(grad, query, key, value, mask, out, lse)
    states, bias = (query, spread_heads(key, query), spread_heads(value, query)), attention_bias(mask, query.dtype)
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = differentiate(grad, *states, out, lse, 0.0, False, attn_mask=bias)
    return grads[0], sum_heads(grads[1], key), sum_heads(grads[2], value)


def attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """Return the output and the log-sum-exp, from the scores of CHUNK queries at a time."""
    outs, lses = [], []
    for start in range(0, query.shape[2], CHUNK):
        scores_BKGCS, _ = score_chunk(query, key, mask, start)
        max_BKGC1 = scores_BKGCS.amax(-1, keepdim=True)
        exps_BKGCS = scores_BKGCS.sub_(max_BKGC1).exp_()
        sum_BKGC1 = exps_BKGCS.sum(-1, keepdim=True)
        exps_BKCS = exps_BKGCS.to(query.dtype).flatten(2, 3)
        out_BKCD = exps_BKCS @ value[:, :, : exps_BKCS.shape[-1]]
        out_BKCD = (out_BKCD / sum_BKGC1.flatten(2, 3)).to(query.dtype)
        outs.append(ungroup_heads(out_BKCD, query).transpose(1, 2))
        lses.append((max_BKGC1 + sum_BKGC1.log())[..., 0].flatten(1, 2))
    # Laid out as the next projection reads it, which then keeps no copy for its backward pass.
    return torch.cat(outs, 1).transpose(1, 2), torch.cat(lses, 2)


def differentiate_in_chunks(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, making the scores of each chunk again."""
    query_grads = []
    grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    mean_BHT = (grad.to(lse.dtype) * out).sum(-1)
    for start in range(0, query.shape[2], CHUNK):
        scores_BKGCS, rows_BKCD = score_chunk(query, key, mask, start)
        *_, count, end = scores_BKGCS.shape
        chunk = slice(start, start + count)
        grad_BKCD = group_heads(grad[:, :, chunk], key)
        lse_BKGC1, mean_BKGC1 = (x[:, :, chunk].unflatten(1, (key.shape[1], -1))[..., None] for x in (lse, mean_BHT))
        shares_BKGCS = scores_BKGCS.sub_(lse_BKGC1).exp_()
        along_BKGCS = (grad_BKCD @ value[:, :, :end].mT).view_as(shares_BKGCS)
        grad_scores_BKGCS = (along_BKGCS - mean_BKGC1).mul_(shares_BKGCS)
        grad_scores_BKCS, shares_BKCS = (x.to(query.dtype).flatten(2, 3) for x in (grad_scores_BKGCS, shares_BKGCS))
        grad_rows_BKCD = grad_scores_BKCS @ key[:, :, :end] * query.shape[-1] ** -0.5
        query_grads.append(ungroup_heads(grad_rows_BKCD, query))
        grad_key[:, :, :end] += grad_scores_BKCS.mT @ rows_BKCD
        grad_value[:, :, :end] += shares_BKCS.mT @ grad_BKCD
    return torch.cat(query_grads, 2), grad_key.to(key.dtype), grad_value.to(value.dtype)


def score_chunk(
    query: Tensor, key: Tensor, mask: Tensor, start: int
) -> tuple[Float[Tensor, "b kv g c s"], Float[Tensor, "b kv rows d"]]:
    """Return the scores of CHUNK queries for the keys up to the last of them, and these queries.

    The queries are scaled.
    """
    end = min(start + CHUNK, query.shape[2])
    rows_BKCD = group_heads(query[:, :, start:end], key) * query.shape[-1] ** -0.5
    scores_BKGCS = (rows_BKCD @ key[:, :, :end].mT).unflatten(2, (-1, end - start))
    wide = torch.promote_types(query.dtype, torch.float32)
    return scores_BKGCS + attention_bias(mask[:, :, None, start:end, :end], wide), rows_BKCD


def group_heads(x: Float[Tensor, "b h c d"], key: Tensor) -> Float[Tensor, "b kv rows d"]:
    """Put the queries of a group's heads side by side, so that its keys are not repeated."""
    return x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def ungroup_heads(x: Float[Tensor, "b kv rows d"], query: Tensor) -> Float[Tensor, "b h c d"]:
    """Undo `group_heads`."""
    return x.unflatten(2, (query.shape[1] // x.shape[1], -1)).flatten(1, 2)
