"""Train the demo's target: a small Qwen3 on the standard library's own code and documentation.

    python -m scripts.demo_target.train --minutes 52 --out outputs/demo_target

The learning rate follows the used share of the time budget, so the same command gives the best
model that a machine can reach in that time.
"""

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.demo.corpus import library_texts
from scripts.demo_target.recipe import (
    SHAPES,
    SOURCE_SHARES,
    build_model,
    build_tokenizer,
    deepen_model,
    encode_texts,
    texts_by_source,
)

FIRST_SNAPSHOT, MINUTES_BETWEEN_SNAPSHOTS = 1, 5  # minutes
LOG_EVERY = 50  # steps
WARM_UP_STEPS = 100
HELD_OUT_BATCHES = 4


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build Muon for the layers' matrices and AdamW for embeddings, a head and norms."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and n.startswith("model.layers")]
    others = [p for n, p in named if p.ndim == 1 or not n.startswith("model.layers")]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_scale(step: int, used_share: float) -> float:
    """Return the factor of the learning rate: warm-up by steps, constant, linear decay in the last 30 % of the time."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1 - used_share) / 0.3))


def batches(streams: dict[str, np.ndarray], args: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Yield batches of random windows of the streams, in the proportions of the mixture."""
    rng = np.random.default_rng([seed, dist.get_rank()])
    names = [name for name in SOURCE_SHARES if name in streams]
    weights = np.array([SOURCE_SHARES[name] for name in names])
    while True:
        rows = []
        for name in rng.choice(names, size=args.batch, p=weights / weights.sum()):
            stream = streams[name]
            start = rng.integers(len(stream) - args.length)
            rows.append(stream[start : start + args.length + 1].astype(np.int64))
        yield torch.from_numpy(np.stack(rows))


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    ids = ids.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Any, stream: np.ndarray, args: argparse.Namespace) -> float:
    """Return the mean loss over fixed windows of the held-out stream, split among the workers."""
    count = len(stream) // (args.length + 1)
    windows = stream[: count * (args.length + 1)].reshape(count, -1).astype(np.int64)
    indices = np.linspace(0, count - 1, dist.get_world_size() * HELD_OUT_BATCHES * args.batch)
    local_windows = windows[indices.astype(int)[dist.get_rank() :: dist.get_world_size()]]
    losses = [next_token_loss(model, torch.from_numpy(part)) for part in np.split(local_windows, HELD_OUT_BATCHES)]
    return float(mean_of_workers(torch.stack(losses).mean()))


def mean_of_workers(value: Tensor) -> Tensor:
    if dist.get_world_size() > 1:  # gloo runs on the CPU
        dist.all_reduce(value)
    return value / dist.get_world_size()


def average_gradients(model: nn.Module) -> None:
    if dist.get_world_size() == 1:
        return
    grads = [param.grad for param in model.parameters()]
    flat = mean_of_workers(torch.cat([grad.flatten() for grad in grads]))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def save_snapshot(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a bf16 Hugging Face directory under a temporary name, then rename it to `out`."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    half = type(model)(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.config.dtype = torch.bfloat16
    half.save_pretrained(new)
    tokenizer.save_pretrained(new)
    tokenizer_config = new / "tokenizer_config.json"
    text = tokenizer_config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    tokenizer_config.write_text(text)  # a class name that transformers 4 has too
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def prepare(folder: Path, seed: int) -> tuple[PreTrainedTokenizerFast, dict[str, np.ndarray], np.ndarray, float]:
    """Load the tokenizer, a stream of token ids per source, a held-out stream and the bytes per token in it.

    They are created once in `folder`, which can be copied.
    """
    if not folder.exists():
        texts = texts_by_source(seed)
        tokenizer = build_tokenizer(texts["code"] + texts["docs"])
        held_out = library_texts("code", held_out=True) + library_texts("docs", held_out=True)
        streams = {source: encode_texts(tokenizer, part) for source, part in texts.items()}
        streams["held_out"] = encode_texts(tokenizer, held_out)
        num_bytes = sum(len(text.encode()) for text in held_out)
        tokenizer.save_pretrained(folder)
        np.savez(folder / "streams.npz", held_out_bytes=num_bytes, **streams)
    streams = dict(np.load(folder / "streams.npz"))
    num_bytes, held_out = int(streams.pop("held_out_bytes")), streams.pop("held_out")
    sizes = {source: len(ids) for source, ids in streams.items()}
    print(f"tokens: {sizes}, held out: {len(held_out)}", flush=True)
    return AutoTokenizer.from_pretrained(folder), streams, held_out, num_bytes / len(held_out)


def start_worker(rank: int, args: argparse.Namespace) -> torch.device:
    """Join the process group and return the device: a GPU for a single worker, if there is one.

    Several workers run one thread each, so that no other process can stall them.
    """
    rendezvous = f"file://{args.out.resolve()}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.workers)
    if args.workers > 1:
        torch.set_num_threads(1)
    return torch.device("cuda" if args.workers == 1 and torch.cuda.is_available() else "cpu")


def compile_layers(model: Any) -> None:
    """Compile each layer; all layers share one graph because only their weights differ."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def train(
    rank: int, args: argparse.Namespace, tokenizer, streams: dict, held_out: np.ndarray, bytes_per_token: float
) -> None:
    """Run one worker of a data-parallel training run."""
    device = start_worker(rank, args)
    torch.manual_seed(args.seed)
    shape = SHAPES[args.shape]
    model = build_model(shape, shape.layers_at(0.0))
    model.to(device)
    compile_layers(model)
    optimizers = build_optimizers(model)
    step, minutes, next_snapshot = 0, 0.0, FIRST_SNAPSHOT
    rows = batches(streams, args, seed=args.seed)
    if rank == 0:
        save_snapshot(model, tokenizer, args.out)
        compile_all(model, next(rows))
    dist.barrier()
    if rank > 0:  # after rank 0, whose kernels are in the cache
        compile_all(model, next(rows))
    model.zero_grad()

    dist.barrier()
    began, recent = time.monotonic(), []
    while minutes < args.minutes:
        if model.config.num_hidden_layers < shape.layers_at(minutes / args.minutes):
            model = deepen_model(model, shape, shape.layers_at(minutes / args.minutes))
            compile_layers(model)
            optimizers = build_optimizers(model)
        scale = lr_scale(step, minutes / args.minutes)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * scale
        loss = next_token_loss(model, next(rows))
        loss.backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=False)
        recent.append(loss.detach())

        clock = torch.tensor((time.monotonic() - began) / 60, dtype=torch.float64)
        dist.broadcast(clock, src=0)
        step, minutes = step + 1, float(clock)
        done = minutes >= args.minutes
        if step % LOG_EVERY == 0 or done:
            train_loss = float(mean_of_workers(torch.stack(recent).mean()))
            unseen_loss = held_out_loss(model, held_out, args)
            recent = []
            if rank == 0:
                log(args, step, minutes, train_loss, unseen_loss, bytes_per_token)
        if minutes >= next_snapshot or done:
            next_snapshot += MINUTES_BETWEEN_SNAPSHOTS
            if rank == 0:
                save_snapshot(model, tokenizer, args.out)


def compile_all(model: Any, ids: Tensor) -> None:
    """Compile forward, backward and evaluation before the time budget starts."""
    next_token_loss(model, ids).backward()
    with torch.no_grad():
        next_token_loss(model, ids)


def log(
    args: argparse.Namespace, step: int, minutes: float, train_loss: float, unseen_loss: float, bytes_per_token: float
) -> None:
    tokens = step * args.workers * args.batch * args.length
    bits = unseen_loss / math.log(2) / bytes_per_token
    is_new = step <= LOG_EVERY
    with Path(f"{args.out}.csv").open("w" if is_new else "a") as out:
        if is_new:
            out.write("minutes,tokens,train_loss,held_out_loss,held_out_bits_per_byte\n")
        out.write(f"{minutes:.2f},{tokens},{train_loss:.4f},{unseen_loss:.4f},{bits:.4f}\n")
    print(
        f"{minutes:6.1f} min  step {step}  train {train_loss:.3f}  held-out {unseen_loss:.3f}"
        f"  {bits:.3f} bits/byte  {tokens / minutes / 60:.0f} tokens/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=52, help="budget, compilation not counted")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo_target"))
    parser.add_argument("--shape", choices=SHAPES, default="deep", help="deep: the demo's; wide: for studies")
    parser.add_argument(
        "--workers", type=int, default=3, help="processes of one thread each; 1 takes a GPU if there is one"
    )
    parser.add_argument("--batch", type=int, default=8, help="windows per worker and step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.rendezvous").unlink(missing_ok=True)
    mp.spawn(train, args=(args, *prepare(Path(f"{args.out}.data"), args.seed)), nprocs=args.workers)


if __name__ == "__main__":
    main()
