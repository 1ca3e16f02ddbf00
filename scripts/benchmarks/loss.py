"""Compare time and memory of the chunked loss with the plain one.

    python -m scripts.benchmarks.loss chunked --vocab 151936 --tokens 768 --width 512 --chunk 128

As a program it measures one form in a fresh process, so that the peak memory is only that of this
form, and prints JSON. `compare` runs it for both forms in alternating order.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.report.tables import Table
from models.device.memory_watch import read_host_peak
from models.losses.chunked import Metrics, build_target_distribution, chunked_distillation_loss, sum_metrics
from models.losses.config import LossConf, LossName
from models.losses.distributions import draft_distribution
from models.losses.heads import apply_heads
from models.losses.token_losses import score_tokens


def distillation_loss(
    draft_hidden: Tensor,
    target_hidden_or_topk: Any,
    *,
    draft_heads: list[Tensor],
    target_head: Any,
    weight: Tensor,
    labels: Tensor | None,
    kept_ids: Tensor | None,
    conf: LossConf,
) -> tuple[Tensor, Metrics]:
    """Return what `chunked_distillation_loss` does: all logits at once, gradients by autograd."""
    target = build_target_distribution(target_head, target_hidden_or_topk, labels, kept_ids, conf)
    logits = apply_heads(draft_heads, draft_hidden)
    draft = draft_distribution(logits, target, temperature=conf.temperature)
    scores = score_tokens(draft, target, kept_ids, conf)
    with torch.no_grad():
        metrics = sum_metrics(scores, weight)
    return (scores["loss"] * weight).sum(), metrics


FORMS = {"plain": distillation_loss, "chunked": chunked_distillation_loss}
ORDER = ("plain", "chunked", "chunked", "plain")
ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True)
class Size:
    """The sizes of the inputs of the loss."""

    vocab: int = 151_936
    tokens: int = 768
    width: int = 512
    chunk: int = 128


def measure(form: str, size: Size) -> dict[str, float]:
    """Measure the second of two forward and backward passes, and the peak memory above weights and inputs."""
    _pass(form, _inputs(Size(vocab=1024, tokens=8, width=size.width, chunk=4)), chunk=4)
    inputs = _inputs(size)
    baseline_mib = read_host_peak() / 2**20
    for _ in range(2):
        began = time.perf_counter()
        loss = _pass(form, inputs, chunk=size.chunk)
        seconds = time.perf_counter() - began
    return {"loss": loss, "seconds": seconds, "peak_mib": read_host_peak() / 2**20 - baseline_mib}


def _inputs(size: Size) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=generator, std=shape[-1] ** -0.25)

    return {
        "draft_hidden": normal(size.tokens, size.width).requires_grad_(),
        "target_hidden_or_topk": normal(size.tokens, size.width),
        "draft_heads": [normal(size.vocab, size.width).requires_grad_()],
        "target_head": normal(size.vocab, size.width),
        "weight": torch.ones(size.tokens),
    }


def _pass(form: str, inputs: dict[str, Any], *, chunk: int) -> float:
    for tensor in (inputs["draft_hidden"], *inputs["draft_heads"]):
        tensor.grad = None
    conf = LossConf(name=LossName.lk_hybrid, logits_chunk=chunk)
    total, _ = FORMS[form](**inputs, labels=None, kept_ids=None, conf=conf)
    total.backward()
    return total.item() / len(inputs["weight"])


def compare(size: Size, *, threads: int, order: tuple[str, ...] = ORDER) -> Table:
    """Build the table: seconds and peak memory of both forms, and ratios to the plain form."""
    costs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    options = [f"--{name}={value}" for name, value in (asdict(size) | {"threads": threads}).items()]
    for form in order:
        command = [sys.executable, "-m", "scripts.benchmarks.loss", form, *options]
        process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        costs[form].append(json.loads(process.stdout))
    seconds = {form: sum(cost["seconds"] for cost in costs[form]) / len(costs[form]) for form in FORMS}
    peak = {form: max(cost["peak_mib"] for cost in costs[form]) for form in FORMS}
    rows = [
        [
            form,
            f"{seconds[form]:.2f}",
            f"{seconds[form] / seconds['plain']:.2f}",
            f"{peak[form]:.0f}",
            f"{peak[form] / peak['plain']:.2f}",
            f"{costs[form][0]['loss']:.6f}",
        ]
        for form in FORMS
    ]
    return Table(
        title="Chunked loss beside the plain loss",
        note=f"Forward and backward over {size.tokens} tokens, vocabulary {size.vocab:,}, hidden "
        f"size {size.width}, chunks of {size.chunk} tokens, float32, not compiled. Memory: peak of "
        "a fresh process above weights and inputs; the head's gradient is in both.",
        columns=["loss", "seconds", "/ plain", "peak MiB", "/ plain", "value"],
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    form, threads = options.pop("form"), options.pop("threads")
    torch.set_num_threads(threads)
    print(json.dumps(measure(form, Size(**options))))


if __name__ == "__main__":
    main()
