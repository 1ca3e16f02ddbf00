"""Measure a target for the demo: held-out bits per byte, loops in greedy answers, samples.

python -m scripts.demo_target.report outputs/demo_final --log outputs/demo_target.csv
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.demo.corpus import library_texts
from data.demo.prompts import CATEGORIES, held_out_prompts
from infer.results.metrics import is_looping
from scripts.demo_target.recipe import encode_texts
from scripts.demo_target.train import next_token_loss


@torch.no_grad()
def report(folder: Path) -> None:
    """Print held-out bits per byte, loops in greedy continuations and samples of each category."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for kind in ("code", "docs"):
        texts = library_texts(kind, held_out=True)
        stream = torch.from_numpy(encode_texts(tokenizer, texts).astype(np.int64))
        windows = stream[: len(stream) // 257 * 257].view(-1, 257)
        loss = torch.stack([next_token_loss(model, rows) for rows in windows.split(8)[:-1]]).mean()
        bits = float(loss) / math.log(2) * len(stream) / sum(len(text.encode()) for text in texts)
        print(f"held-out {kind}: {float(loss):.3f} nats per token, {bits:.3f} bits per byte")

    answers = {category: [] for category in CATEGORIES}
    for prompt in held_out_prompts():
        inputs = tokenizer(prompt.text, return_tensors="pt").input_ids
        ids = model.generate(inputs, max_new_tokens=96, do_sample=False)[0, inputs.shape[1] :]
        answers[prompt.category].append((prompt, ids.tolist()))
    for category, pairs in answers.items():
        looping = sum(is_looping(ids) for _, ids in pairs)
        print(f"\n{category}: {looping} of {len(pairs)} loop")
        for prompt, ids in pairs[:3]:
            print(f"--- {prompt.id}\n{prompt.text}<<<{tokenizer.decode(ids)}>>>")


def plot(log: Path) -> None:
    """Write the loss curve as an SVG next to the log."""
    rows = np.genfromtxt(log, delimiter=",", names=True)
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for name in ("train_loss", "held_out_loss"):
        axes.plot(rows["tokens"] / 1e6, rows[name], label=name.replace("_", " "))
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1.5, 6))
    axes.legend()
    figure.savefig(log.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the target")
    parser.add_argument("--log", type=Path, help="of its training; the loss curve is written next to it")
    args = parser.parse_args()
    report(args.folder)
    if args.log:
        plot(args.log)


if __name__ == "__main__":
    main()
