"""Compare matrix products in float32 and bfloat16 on this CPU, by the size of a model.

    python -m scripts.benchmarks.precision

The weights of all layers are multiplied in turn, with few rows, as in decoding. Printed are the
seconds in float32 over those in bfloat16: above 1, bfloat16 is faster.
"""

import time

import torch
from torch import Tensor
from torch.nn.functional import linear

SHAPES = ((6, 320, 784), (8, 512, 1408), (12, 1024, 2816), (8, 2048, 5632))  # layers, widths
ROWS = (1, 5, 13, 33)
REPEATS = 8


def main() -> None:
    torch.set_num_threads(1)
    print("| layers x width | weights |", *(f"{rows} rows |" for rows in ROWS))
    print("|---|---:|" + "---:|" * len(ROWS))
    for layers, size, inner in SHAPES:
        sizes = [(size, size)] * 4 + [(inner, size)] * 3
        weights = [torch.randn(*shape) for _ in range(layers) for shape in sizes]
        # As in a compiled decoder: float32 weights by column (Device.arrange_weights).
        by_column = [weight.t().contiguous().t() for weight in weights]
        halves = [weight.bfloat16() for weight in weights]
        ratios = [time_products(by_column, rows) / time_products(halves, rows) for rows in ROWS]
        millions = round(sum(weight.numel() for weight in weights) / 1e6)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {layers} x {size:,} | {millions} M | {cells} |", flush=True)


@torch.no_grad()
def time_products(weights: list[Tensor], rows: int) -> float:
    """Return the seconds of the fastest of several passes over all weights."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        start = time.perf_counter()
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
