"""Time a round of decoding on a target: without a draft, with n-gram lookup, with a chain of each draft.

    python -m scripts.benchmarks.rounds [KEY=VALUE ...] --target DIR --drafts outputs/train/A/checkpoint

One row, greedy. A mode's time is that of its fastest answer, without the prompt, by its rounds.
"""

import argparse
import time
from pathlib import Path

import torch

from conf.entry import compose
from infer.engine.decode import Decoder
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.drafts.registry import load_draft
from models.targets.loading import load_target
from models.targets.precision import build_device
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from train.config.run import TrainConf

TEXT = "The quick brown fox jumps over the lazy dog and"
DRAFTED, NEW_TOKENS, REPEATS = 4, 48, 5


def time_rounds(decoder: Decoder, prompt: list[int]) -> tuple[float, float]:
    """Return the least seconds of a round, and the tokens of a round."""
    decoder.decode([prompt], row_ids=[0], max_new_tokens=NEW_TOKENS)  # compiles
    seconds, tau = [], 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        (answer,) = decoder.decode([prompt], row_ids=[0], max_new_tokens=NEW_TOKENS)
        rounds = len(answer.accepted)
        seconds.append((time.perf_counter() - start - answer.prefill_s) / rounds)
        tau = 1 + sum(answer.accepted) / rounds
    return min(seconds), tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a model")
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], help="checkpoints")
    parser.add_argument("--slots", type=int, default=128, help="for prompt and answer")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of conf/train.yaml")
    args = parser.parse_intermixed_args()
    conf = compose("train", TrainConf, [f"target.name={args.target}", f"target.path={args.target}", *args.overrides])
    target = load_target(conf.target, build_device(conf.device, conf.target))
    prompt = target.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    modes: dict[str, Draft | None] = {"none": None, "n-gram": NgramDraft()}
    modes |= {str(folder): load_draft(folder, target) for folder in args.drafts}
    layers = next((draft.needs.layers for draft in modes.values() if draft and draft.needs.layers), [])
    print("| draft | ms a round | tokens a round |\n|---|---:|---:|")
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers), torch.no_grad():
        for name, draft in modes.items():
            depth = min(DRAFTED, draft.max_depth) if draft else 0
            tree = TreeConf(kind=TreeKind.chain, depth=depth).build() if draft else NO_TREE
            captured = (draft and draft.needs.layers) or layers
            decoder = Decoder(target, draft, tree, sampling=SamplingConf(), slots=args.slots, layers=captured)
            seconds, tau = time_rounds(decoder, prompt)
            print(f"| {name} | {1e3 * seconds:.1f} | {tau:.2f} |", flush=True)


if __name__ == "__main__":
    main()
