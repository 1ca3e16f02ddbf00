"""Evaluation during training: a few prompts, decoded with the tree that will be served."""

from collections.abc import Callable

from infer.config import EvaluationConf
from infer.engine.decode import Decoder
from models.drafts.base import Draft, SpeculativePair
from models.speculate.tree import Tree
from models.target.target import Target


def build_quick_eval(
    target: Target, prompts: list[list[int]], tree: Tree, conf: EvaluationConf
) -> Callable[[Draft], dict[str, float]]:
    """Return a function that decodes `prompts` with a draft and returns the draft's metrics.

    These are the delivered tokens per round, the acceptance length, and the share of rounds that
    accepted at least each depth. Delivered tokens do not include tokens past the end of an answer,
    which no user gets, nor the first token, which the prefill emits.
    """
    slots = max(len(prompt) for prompt in prompts) + conf.quick_tokens

    def evaluate(draft: Draft) -> dict[str, float]:
        # Eager: compiling would take longer than the few rounds that are decoded here.
        verifying_target = SpeculativePair(target=target, draft=draft).verifying_target.eager()
        decoder = Decoder(
            verifying_target, draft, tree, sampling=conf.sampling, slots=slots, batch=len(prompts)
        )
        generations = decoder.decode(
            prompts, row_ids=list(range(len(prompts))),
            max_new_tokens=conf.quick_tokens, eos_ids=target.eos_ids,
        )  # fmt: skip
        accepted = [count for generation in generations for count in generation.accepted]
        rounds = max(1, len(accepted))  # no round is needed if the first token ends every answer
        delivered = sum(len(generation.ids) - 1 for generation in generations)
        return {
            "delivered_per_round": delivered / rounds,
            "acceptance_length": 1 + sum(accepted) / rounds,  # 1: the target's own token
        } | {
            f"accepted_{depth}": sum(count >= depth for count in accepted) / rounds
            for depth in range(1, tree.max_path_length + 1)
        }

    return evaluate
