"""Compare time and memory of the unrolled attention with the form that keeps all scores.

    python -m scripts.benchmarks.attention --write       the table of docs/benchmarks.md and docs/img/attention.svg

A row of an 8B's widths goes through the seven steps of EAGLE-3's training-time test, forward and back.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import matplotlib.pyplot as plt
import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from infer.report.number_format import Table
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.layers import spread_heads
from models.targets.attention import without_kernel
from models.unrolled_attention import attend_unrolled, score_own_keys
from scripts.benchmarks.tables import PAGE, machine, publish

HEADS, KV_HEADS, HEAD_SIZE, STEPS = 32, 8, 128, 7
LENGTHS = (512, 1024, 2048, 4096)
PICTURE = PAGE.parent / "img" / "attention.svg"


def attend_plainly(query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Return what `attend_unrolled` does: one softmax over all keys, gradients by autograd."""
    dense_BHTS = query @ spread_heads(keys[0], query).mT * HEAD_SIZE**-0.5
    own_BHTN = [score_own_keys(query, key)[..., None] for key in keys[1:]]
    shares = torch.cat([dense_BHTS.masked_fill(~mask, -torch.inf), *own_BHTN], -1).softmax(-1)
    dense_BHTS, *own_BHT1 = shares.split([query.shape[2], *[1] * len(own_BHTN)], -1)
    out = dense_BHTS @ spread_heads(values[0], query)
    return out + sum(share * spread_heads(value, query) for share, value in zip(own_BHT1, values[1:], strict=True))


FORMS = {"plain": attend_plainly, "kernel": attend_unrolled, "chunks": attend_unrolled}


def measure(form: str, length: int) -> dict[str, float]:
    """Measure the most that PyTorch's allocator holds above the inputs, and the seconds of a second pass."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.empty(1, heads, length, HEAD_SIZE).normal_(generator=generator).requires_grad_()

    queries = [normal(HEADS) for _ in range(STEPS)]
    keys, values = ([normal(KV_HEADS) for _ in range(STEPS)] for _ in range(2))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    def run() -> None:
        outs = [FORMS[form](query, keys[: n + 1], values[: n + 1], mask) for n, query in enumerate(queries)]
        torch.autograd.grad(outs, [*queries, *keys, *values], [torch.ones(()).expand_as(out) for out in outs])

    with without_kernel() if form == "chunks" else nullcontext():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        began = time.process_time()  # of this process: other work on the machine does not count
        run()
        seconds = time.process_time() - began
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return {"seconds": seconds, "peak_mib": max(held) / 2**20}


def is_feasible(form: str, length: int) -> bool:
    """Return whether the form's memory is free: the plain one keeps masked scores, shares and a copy of them."""
    return form != "plain" or (3 * STEPS + 3) * 4 * HEADS * length**2 < psutil.virtual_memory().available


def compare(lengths: Sequence[int], *, repeats: int) -> dict[str, dict[int, dict[str, float]]]:
    """Measure all forms in turns; return for each the cost of each length that fits, the least of all repeats."""
    costs: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for length in lengths:
        for form in [form for form in FORMS if is_feasible(form, length)] * repeats:
            cost = measure(form, length)
            costs[form][length] = {key: min(value, costs[form].get(length, cost)[key]) for key, value in cost.items()}
    return costs


def build_table(costs: dict[str, dict[int, dict[str, float]]]) -> Table:
    """Build the table: memory, seconds, their growth from the row of half the length, and seconds by plain ones."""
    rows = []
    for form, by_length in costs.items():
        for length, cost in by_length.items():
            half, plain = by_length.get(length // 2), costs["plain"].get(length)
            growth = [f"{cost[key] / half[key]:.2f}" if half else "" for key in ("peak_mib", "seconds")]
            ratio = f"{cost['seconds'] / plain['seconds']:.2f}" if plain else ""
            rows.append(
                [form, f"{length:,}", f"{cost['peak_mib']:,.0f}", growth[0], f"{cost['seconds']:.2f}", growth[1], ratio]
            )
    return Table(
        title="Attention of the training-time test",
        note=f"A row of {HEADS} heads and {KV_HEADS} key-value heads of {HEAD_SIZE}, {STEPS} steps, forward and "
        "backward, float32. Memory: the most that PyTorch's allocator holds above the inputs. Growth: from half the "
        "length. kernel: PyTorch's, on CPUs; chunks: what other devices run; plain: a softmax over all scores, which "
        "it keeps. Seconds: of one thread, the least of all repeats.",
        columns=["form", "tokens", "peak MiB", "growth", "seconds", "growth", "/ plain"],
        rows=rows,
    )


def draw(costs: dict[str, dict[int, dict[str, float]]]) -> None:
    """Draw memory and seconds by the length of the row."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axes, key, label in zip(panels, ("peak_mib", "seconds"), ("peak memory, MiB", "seconds"), strict=True):
        for form, by_length in costs.items():
            axes.plot([*by_length], [cost[key] for cost in by_length.values()], marker="o", label=form)
        axes.set(xlabel="tokens of a row", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(LENGTHS, labels=map(str, LENGTHS), minor=False)
        axes.minorticks_off()
    panels[0].legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare time and memory of the unrolled attention with plain scores.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="update docs/benchmarks.md and its picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = compare(LENGTHS, repeats=args.repeats)
    setting = machine(open_device(DeviceConf(name=DeviceName.cpu, compile=False)))
    publish("attention", build_table(costs), setting=setting, should_write=args.write)
    if args.write:
        draw(costs)


if __name__ == "__main__":
    main()
