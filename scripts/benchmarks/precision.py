"""Compare matrix products in float32 and bfloat16 on this CPU, by the size of a model.

    python -m scripts.benchmarks.precision

The weights of all layers are multiplied in turn, with few rows, as in decoding. Printed are the
seconds in float32 over those in bfloat16: above 1, bfloat16 is faster.
"""

import copy
import time

import torch
from torch import nn

from models.device.cpu import pack_linear_layers

SHAPES = ((6, 320, 784), (8, 512, 1408), (12, 1024, 2816), (8, 2048, 5632))  # layers, widths
ROWS = (1, 5, 13, 33)
REPEATS = 8


def main() -> None:
    torch.set_num_threads(1)
    print("| layers x width | weights |", *(f"{rows} rows |" for rows in ROWS))
    print("|---|---:|" + "---:|" * len(ROWS))
    for layers, size, inner in SHAPES:
        sizes = [(size, size)] * 4 + [(inner, size)] * 3
        full = nn.ModuleList(
            nn.Linear(inputs, outputs, bias=False) for _ in range(layers) for outputs, inputs in sizes
        ).requires_grad_(False)
        half = copy.deepcopy(full).bfloat16()
        for packed in (full, half):
            pack_linear_layers(packed)  # as in a compiled decoder
        ratios = [time_products(full, rows) / time_products(half, rows) for rows in ROWS]
        millions = round(sum(weight.numel() for weight in full.parameters()) / 1e6)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {layers} x {size:,} | {millions} M | {cells} |", flush=True)


@torch.no_grad()
def time_products(layers: nn.ModuleList, rows: int) -> float:
    """Return the seconds of the fastest of several passes over all layers."""
    inputs = {x.in_features: torch.randn(rows, x.in_features, dtype=x.weight.dtype) for x in layers}
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        start = time.perf_counter()
        for layer in layers:
            layer(inputs[layer.in_features])
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
