"""Compare operators that every accelerator's compiler has with the plain forms that they equal.

    python -m scripts.benchmarks.operators --threads 1

Printed are the seconds of our form over those of the plain form, from calls that alternate: above 1,
the plain form is faster. A row is a node of a tree, or one of the POSITIONS whose likeliest tokens a loss or a store
takes at a time; prompts have PROMPT tokens.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from models.operators import drop_tail, mark_tokens, topk_rows

VOCABULARIES, ROWS = (32_000, 151_936), (1, 5, 20)
POSITIONS = 256
PROMPT = 2048
REPEATS, SECONDS = 15, 0.5  # at least, of a pair of forms


def drop_tail_by_sort(scores: Tensor, mass: float, *, stable: bool = False) -> Tensor:
    """Return what `drop_tail` does, by a sort and a cumulative sum; among equal scores only if the sort is stable."""
    ordered, order = scores.sort(dim=-1, stable=stable)
    unlikely = ordered.softmax(-1).cumsum(-1) <= mass
    unlikely[..., -1] = False  # the likeliest token always stays
    return scores.masked_fill(unlikely.scatter(-1, order, unlikely), -torch.inf)


def mark_tokens_by_counts(ids: Tensor, is_counted: Tensor, vocab: int) -> Tensor:
    """Return what `mark_tokens` does, by a scatter that adds integers."""
    counts = torch.zeros((*ids.shape[:-1], vocab), dtype=torch.int64)
    return counts.scatter_add(-1, ids, is_counted.long()) > 0


def mark_paths(ids: Tensor, ancestors: Tensor, vocab: int) -> Tensor:
    """Return the tokens on the path to each node, by `mark_tokens`."""
    return mark_tokens(ids[:, None].expand_as(ancestors), ancestors, vocab)


def mark_paths_by_product(ids: Tensor, ancestors: Tensor, vocab: int) -> Tensor:
    """Return what `mark_paths` does, by a product with one-hot rows."""
    return ancestors.float() @ one_hot(ids, vocab).float() > 0


Case = tuple[Callable, Callable, tuple[Any, ...]]


def build_cases(vocab: int, rows: int) -> dict[str, Case]:
    """Build the arguments of our form and the plain form of each operator."""
    numbers = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(rows, vocab, generator=numbers)
    cases: dict[str, Case] = {f"top-k of {count}": (topk_rows, torch.topk, (scores, count)) for count in (8, 64)}
    if rows == POSITIONS:
        return cases
    prompts = torch.randint(vocab, (rows, PROMPT), generator=numbers)
    nodes = torch.randint(vocab, (1, rows), generator=numbers)
    ancestors = torch.ones(1, rows, rows, dtype=torch.bool).tril()
    return cases | {
        "top-p of 0.9": (drop_tail, drop_tail_by_sort, (scores, 0.1)),
        "tokens of prompts": (mark_tokens, mark_tokens_by_counts, (prompts, prompts > 0, vocab)),
        "tokens of paths": (mark_paths, mark_paths_by_product, (nodes, ancestors, vocab)),
    }


@torch.no_grad()
def time_forms(ours: Callable, plain: Callable, arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Return the median seconds of our form and of the plain form."""
    seconds: dict[Callable, list[float]] = {ours: [], plain: []}
    end = time.perf_counter() + SECONDS
    while len(seconds[ours]) < 2 + REPEATS or time.perf_counter() < end:  # the first two calls warm up
        for form, times in seconds.items():
            began = time.perf_counter()
            form(*arguments)
            times.append(time.perf_counter() - began)
    return median(seconds[ours][2:]), median(seconds[plain][2:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Operators, measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    print("| operator | vocabulary | rows | eager ms | / plain | compiled ms | / plain |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for vocab in VOCABULARIES:
        for rows in (*ROWS, POSITIONS):
            for name, (ours, plain, arguments) in build_cases(vocab, rows).items():
                torch.compiler.reset()
                compiled = [torch.compile(form, fullgraph=True, dynamic=False) for form in (ours, plain)]
                pairs = (time_forms(ours, plain, arguments), time_forms(compiled[0], compiled[1], arguments))
                cells = " | ".join(f"{1e3 * new:.2f} | {new / old:.2f}" for new, old in pairs)
                print(f"| {name} | {vocab:,} | {rows} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
