"""Compare answers in this process with batches of `generate`: same prompts, rows and precision.

    python -m scripts.engines.answers --target DIR --prompts FILE [--compile] [--write]

Both decode greedily to the end of each answer. `generate` gets the prompts as they come, and sorted
by length, which wastes less padding. Ways take turns, the second turn in reverse.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from data.prepare_config import AnswersConf
from infer.engine.answer_backend import TargetAnswerBackend
from infer.report.number_format import Table
from models.device.config import DeviceConf, Precision
from models.device.opening import open_device
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.target import Target
from scripts.benchmarks.tables import machine, publish

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
TURNS = 2  # of each way: in order and in reverse
Answer = Callable[[], int]  # answers all prompts and returns the number of new tokens


def answer_here(target: Target, prompts: list[list[int]], conf: AnswersConf) -> int:
    """Answer all prompts as `data.prepare` does; return the number of tokens."""

    async def answer_all() -> int:
        backend = TargetAnswerBackend(target, conf)
        answers = await asyncio.gather(*(backend.generate_answer(ids, key=key) for key, ids in enumerate(prompts)))
        return sum(len(answer.ids) for answer in answers)

    return asyncio.run(answer_all())


def answer_by_generate(model: torch.nn.Module, prompts: list[list[int]], conf: AnswersConf, *, eos: list[int]) -> int:
    """Answer the prompts in batches of their order, padded on the left; return the tokens."""
    settings = {"max_new_tokens": conf.max_new_tokens, "do_sample": False, "eos_token_id": eos, "pad_token_id": eos[0]}
    tokens = 0
    for first in range(0, len(prompts), conf.batch):
        batch = prompts[first : first + conf.batch]
        longest = max(map(len, batch))
        ids = torch.tensor([eos[:1] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        output = model.generate(ids, attention_mask=mask, **settings)  # pyright: ignore[reportCallIssue]
        ends = torch.isin(output[:, longest:], torch.tensor(eos)).int()
        # An answer counts up to its end, which `generate` repeats as padding.
        tokens += int(((ends.cumsum(1) - ends) == 0).sum())
    return tokens


def measure(ways: dict[str, Answer]) -> dict[str, tuple[int, float]]:
    """Return the tokens and seconds of each way, over all turns."""
    totals = dict.fromkeys(ways, (0, 0.0))
    for turn in range(TURNS):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            tokens = ways[name]()
            totals[name] = (totals[name][0] + tokens, totals[name][1] + time.perf_counter() - start)
            print(f"turn {turn + 1}: {name}, {tokens:,} tokens", flush=True)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of a chat model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a `prompt` a line")
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile ours")
    parser.add_argument("--write", action="store_true", help="update docs/data.md")
    args = parser.parse_args()
    device = open_device(DeviceConf(compile=args.compile, precision=Precision[args.precision]))
    target = load_target(TargetConf(name=args.target, path=args.target), device)
    conf = AnswersConf(temperature=0, batch=args.batch, max_new_tokens=args.new_tokens)
    lines = args.prompts.read_text().splitlines()[: args.limit]
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for line in lines
    ]
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=target.head.weight.dtype)
    generate = partial(answer_by_generate, model, conf=conf, eos=list(target.eos_ids))
    here = partial(answer_here, target, prompts, conf)
    if args.compile:
        here()  # compiles
    ways: dict[str, Answer] = {
        "this process": here,
        "`generate`, prompts as they come": partial(generate, prompts),
        "`generate`, prompts sorted by length": partial(generate, sorted(prompts, key=len)),
    }
    totals = measure(ways)
    best = max(tokens / seconds for name, (tokens, seconds) in totals.items() if name != "this process")
    compiled = "compiled" if args.compile else "eager"
    table = Table(
        title="Answers in this process",
        columns=["answers by", "tokens", "tokens/s", "of the better `generate`"],
        rows=[
            [name, f"{tokens:,}", f"{tokens / seconds:.0f}", f"{tokens / seconds / best:.2f}"]
            for name, (tokens, seconds) in totals.items()
        ],
        note=f"{len(prompts)} prompts of {statistics.mean(map(len, prompts)):.0f} tokens (at "
        f"most {max(map(len, prompts))}), up to {args.new_tokens} new tokens, {args.batch} rows, "
        f"{args.precision}; ours {compiled}, `generate` eager; {TURNS} turns.",
    )
    publish(f"answers, {compiled}", table, setting=machine(device), page=PAGE, should_write=args.write)


if __name__ == "__main__":
    main()
