"""Evaluation during training: a few prompts, decoded with the tree that will be served, or rows of a store.

The draft's loss on the decoded answers gives the acceptance length of a chain that reads the text, as in training.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from operator import mul

import torch

from data.features.reader import FeatureStore
from data.features.target_pass import run_target
from data.packing.documents import Packed
from infer.config import EvaluationConf
from infer.engine.decode import Decoder
from models.batch import Batch
from models.drafts.base import Draft, Loss
from models.drafts.loss import compute_loss
from models.targets.target import Target
from models.trees.tree import Tree


def chain_acceptance_length(metrics: dict[str, float]) -> float | None:
    """Return the acceptance length of a chain that reads the text, or None without `hit_<i>`.

    `hit_<i>` is the share of i-th draft tokens that are right where the draft was given the text's own tokens before
    them. The product of the first i is the chance that i tokens are accepted. The target's own token adds 1.

    >>> chain_acceptance_length({"hit_1": 0.5, "hit_2": 0.5})
    1.75
    """
    hits = [metrics[f"hit_{i}"] for i in range(1, len(metrics) + 1) if f"hit_{i}" in metrics]
    return 1 + sum(accumulate(hits, mul)) if hits else None


@torch.no_grad()
def measure_loss_metrics(
    target: Target, draft: Draft, prompts: list[list[int]], answers: list[list[int]], *, length: int
) -> dict[str, float]:
    """Return the averages of the metrics of the draft's loss over the answers' tokens.

    Texts are read one by one, all padded to `length` tokens. A device that compiles every operation
    would need graphs of its own: the result is {} there.
    """
    device = target.device
    if device.lazy:
        return {}
    losses = []
    for prompt, answer in zip(prompts, answers, strict=True):
        position, end = torch.arange(length), len(prompt) + len(answer)
        ids = torch.tensor(prompt + answer + [0] * (length - end))
        batch = Batch(
            input_ids=ids[None],
            answer_mask=((position >= len(prompt)) & (position < end))[None],
            document_ids=torch.where(position < end, 0, -1)[None],
            positions=position[None],
        ).to(device.torch_device)
        target_output = run_target(target, draft.needs.layers, batch)
        losses.append(compute_loss(draft.loss_terms(batch.weigh_drafted_tokens(), target_output)))
    return average_metrics(losses)


def average_metrics(losses: list[Loss]) -> dict[str, float]:
    """Return the averages of the losses' metrics over their tokens."""
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2))
    for loss in losses:
        for name, pair in loss.metrics.items():
            sums[name] += pair.cpu()
    return {name: float(total / count.clamp_min(1)) for name, (total, count) in sums.items()}


def build_stored_eval(target: Target, rows: Packed, store: FeatureStore) -> Callable[[Draft], dict[str, float]]:
    """Return a function that compares a draft with the target on rows of a feature store, and decodes nothing.

    It returns the acceptance length of a chain that reads the text, or a language model's share of right tokens.
    """
    device = target.device.torch_device

    @torch.no_grad()
    def evaluate(draft: Draft) -> dict[str, float]:
        losses = []
        for row in range(len(rows)):
            batch = rows.batch([row]).weigh_drafted_tokens().to(device)
            target_output = store.read_target_output(rows.pieces([row]), rows.length).to(device)
            losses.append(compute_loss(draft.loss_terms(batch, target_output)))
        metrics = average_metrics(losses)
        tau = chain_acceptance_length(metrics)
        return {"hit": metrics["hit"]} if tau is None else {"teacher_forced_tau": tau}

    return evaluate


def build_quick_eval(
    target: Target, prompts: list[list[int]], tree: Tree, conf: EvaluationConf, *, batch: int
) -> Callable[[Draft], dict[str, float]]:
    """Return a function that decodes `prompts` with a draft, `batch` at a time, and returns the draft's metrics.

    Delivered tokens are without those past the end of an answer and the first, which the prefill emits.
    """
    slots = max(len(prompt) for prompt in prompts) + conf.quick_tokens

    def evaluate(draft: Draft) -> dict[str, float]:
        # Eager: compiling would take longer than the few rounds that are decoded here.
        verifying_target = draft.get_verifying_target(target).eager()
        # The decoder is not kept: its caches are freed before the loss takes memory.
        generations = Decoder(
            verifying_target, draft, tree, sampling=conf.sampling, slots=slots, batch=min(batch, len(prompts))
        ).decode(prompts, row_ids=list(range(len(prompts))), max_new_tokens=conf.quick_tokens, eos_ids=target.eos_ids)
        accepted = [count for generation in generations for count in generation.accepted]
        rounds = max(1, len(accepted))  # no round is needed if the first token ends every answer
        delivered = sum(len(generation.ids) - 1 for generation in generations)
        figures = {
            "delivered_per_round": delivered / rounds,
            "acceptance_length": 1 + sum(accepted) / rounds,  # 1: the target's own token
        } | {
            f"accepted_{depth}": sum(count >= depth for count in accepted) / rounds
            for depth in range(1, tree.max_path_length + 1)
        }
        answers = [generation.ids for generation in generations]
        metrics = measure_loss_metrics(target, draft, prompts, answers, length=slots)
        if (tau := chain_acceptance_length(metrics)) is not None:
            figures["teacher_forced_tau"] = tau
        return figures

    return evaluate
