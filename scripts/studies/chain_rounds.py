"""Replay chains of a draft on its target's answers, and compare what two drafts have accepted.

Counts have a row for each prompt: its tokens, its rounds, and how many of its rounds accepted at
least 1, 2, ... draft tokens.
"""

from typing import Any

import numpy as np
from numpy import ndarray

from data.config import DEMO
from data.eval_prompts.prompts import EvalPrompt, load_calibration_prompts
from infer.comparison.metric_changes import estimate_change
from infer.measure.replay import Replay, ReplayText, collect_replay_texts, decoding_starts
from infer.results.intervals import ratio_of_means
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.drafts.base import Draft
from models.io.errors import require
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind

NEW_TOKENS = 64
NUM_UNREAD = 64


def name_target(path: str | None) -> str:
    """Return the last part of a target's path; `demo` for the demo's target, which has none."""
    return DEMO if path is None else path.rstrip("/").rpartition("/")[2]


def load_cpu_target(path: str | None) -> Target:
    """Return the target of a directory, or the demo's, on the CPU and eager."""
    conf = TargetConf(name=name_target(path), path=path)
    return load_target(conf, open_device(DeviceConf(name=DeviceName.cpu, compile=False)))


def load_unread_prompts(tokenizer: Any, file: str | None, read: list[list[int]]) -> list[EvalPrompt]:
    """Return prompts to choose settings by, of a file or of the demo, that begin none of the texts `read`.

    Raises UserError if there are too few.
    """
    candidates = load_calibration_prompts(tokenizer, file or DEMO, 4 * NUM_UNREAD)
    unread = [prompt for prompt in candidates if not any(ids[: len(prompt.ids)] == prompt.ids for ids in read)]
    require(
        len(unread) >= NUM_UNREAD,
        f"--calibration: must have {NUM_UNREAD} prompts that are neither judged nor trained on, got {len(unread)} in "
        f"{file or DEMO}; choose another file",
    )
    return unread[:NUM_UNREAD]


def collect_texts(target: Target, prompts: list[EvalPrompt], *, layers: list[int], depth: int) -> list[ReplayText]:
    """Return the target's greedy answers to the prompts, for chains of up to `depth`."""
    return collect_replay_texts(
        target, prompts, sampling=SamplingConf(), max_new_tokens=NEW_TOKENS, layers=layers, lookahead=depth
    )


def replay_chains(
    target: Target, draft: Draft, texts: list[ReplayText], depths: list[int]
) -> dict[int, list[list[int]]]:
    """Return by the chain's depth, for each prompt, what each round of decoding accepts."""
    chains = {str(depth): TreeConf(kind=TreeKind.chain, depth=depth).build() for depth in depths}
    accepted = Replay(target, draft, texts, sampling=SamplingConf()).accepted_lengths(chains)
    return {depth: [lengths[decoding_starts(lengths)].tolist() for lengths in accepted[str(depth)]] for depth in depths}


def tabulate_rounds(rounds: list[list[int]], depth: int) -> ndarray:
    """Return the counts of rounds that each accepted so many draft tokens, prompt by prompt."""
    rows = []
    for accepted in map(np.array, rounds):
        reached = [(accepted >= position).sum() for position in range(1, depth + 1)]
        rows.append([accepted.sum() + len(accepted), len(accepted), *reached])
    return np.array(rows, dtype=np.float64)


def acceptance_length(counts: ndarray) -> float:
    """Return the tokens per round (tau)."""
    return float(counts[:, 0].sum() / counts[:, 1].sum())


def render_shares(counts: ndarray) -> str:
    """Return the share of rounds that accepted at least 1, 2, ... draft tokens."""
    return " ".join(f"{share:.2f}" for share in counts[:, 2:].sum(0) / counts[:, 1].sum())


def render_difference(counts: list[ndarray], reference: list[ndarray]) -> str:
    """Return how much larger tau is than that of the reference, with its 95 % interval; a list has the runs by seed.

    The interval has the noise between prompts, which are paired, and between seeds.
    """
    new, old = ([run[:, :2] for run in runs] for runs in (counts, reference))
    interval = estimate_change(old, new, ratio_of_means, 0.95)
    difference = acceptance_length(np.sum(new, axis=0)) - acceptance_length(np.sum(old, axis=0))
    return f"{difference:+.2f}" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")
