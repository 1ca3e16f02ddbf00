"""Second stage of the demo's target: train against loops, which greedy decoding produces otherwise.

    python -m scripts.demo_target.unloop --source outputs/demo_target --out outputs/demo_unlooped

The model continues training text greedily. A token that ends an n-gram of the text generated before
is penalized (sequence-level unlikelihood, https://arxiv.org/abs/1908.04319), in addition to the
usual loss. Structured text is excluded, because repetition can be correct there.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo_target.train import average_gradients, batches, next_token_loss, prepare, save_snapshot, start_worker

PEAK_LR = 3e-4
WARM_UP_STEPS = 10
GRAM = 6
PROMPT_TOKENS, NEW_TOKENS = 24, 96


def unloop(rank: int, args: argparse.Namespace, streams: dict) -> None:
    """Run one worker of a data-parallel run, as in the first stage."""
    device = start_worker(rank, args)
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    rows = batches(streams, args, seed=args.seed)
    natural = {source: stream for source, stream in streams.items() if source != "structured"}
    prompts = batches(natural, args, seed=args.seed + 1)

    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        scale = min((step + 1) / WARM_UP_STEPS, 1 - share)
        optimizer.param_groups[0]["lr"] = PEAK_LR * scale
        written = continue_greedily(model, next(prompts)[:, :PROMPT_TOKENS].to(device))
        unlikely, repeated = unlikelihood_loss(model, written)
        likely = next_token_loss(model, next(rows))
        optimizer.zero_grad()
        (likely + unlikely).backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        clock = torch.tensor((time.monotonic() - began) / 60 / args.minutes, dtype=torch.float64)
        dist.broadcast(clock, src=0)
        step, share = step + 1, float(clock)
        if rank == 0 and step % 5 == 0:
            figures = f"train {likely.item():.3f}  unlikelihood {unlikely.item():.3f}"
            print(f"step {step}  {figures}  repeated {repeated:.1%}", flush=True)
    if rank == 0:
        save_snapshot(model, AutoTokenizer.from_pretrained(args.source), args.out)


@torch.no_grad()
def continue_greedily(model: nn.Module, prompts: Tensor) -> Tensor:
    with torch.autocast(model.device.type, torch.bfloat16):
        mask = torch.ones_like(prompts)
        return model.generate(prompts, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)


def unlikelihood_loss(model: nn.Module, written: Tensor) -> tuple[Tensor, float]:
    """Return the mean of -log(1 - p) over repeated tokens per generated token, and their share."""
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(input_ids=written[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), written[:, 1:].flatten(), reduction="none")
    probs = torch.exp(-loss).view(len(written), -1)
    repeats = repeated_grams(written)[:, 1:]
    num_written = (written[:, PROMPT_TOKENS:] != 0).sum().clamp_min(1)
    unlikely = -torch.log((1 - probs[repeats]).clamp_min(1e-4)).sum() / num_written
    return unlikely, float(repeats.sum() / num_written)


def repeated_grams(written: Tensor) -> Tensor:
    """Mark the tokens that end an n-gram generated earlier, up to the end of the text."""
    repeats = torch.zeros(written.shape, dtype=torch.bool)
    for row, ids in enumerate(written.tolist()):
        previous_grams = set()
        for end in range(PROMPT_TOKENS + GRAM, len(ids) + 1):
            gram = tuple(ids[end - GRAM : end])
            if 0 in gram:  # <|endoftext|>
                break
            repeats[row, end - 1] = gram in previous_grams
            previous_grams.add(gram)
    return repeats.to(written.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, default=Path("outputs/demo_target"))
    parser.add_argument("--out", type=Path, default=Path("outputs/demo_unlooped"))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--data", type=Path, help="the folder of token ids from the first stage")
    parser.add_argument("--workers", type=int, default=3, help="as in the first stage")
    parser.add_argument("--batch", type=int, default=12, help="texts per worker and step, for each of the two losses")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    Path(f"{args.out}.rendezvous").unlink(missing_ok=True)
    _, streams, *_ = prepare(args.data or args.source.with_name(args.source.name + ".data"), seed=0)
    mp.spawn(unloop, args=(args, streams), nprocs=args.workers)


if __name__ == "__main__":
    main()
