"""How good a draft is on the way: a few prompts decoded with the tree that will be served."""

from collections.abc import Callable

from infer.config import EvaluationConf
from infer.engine.decode import Decoder
from models.drafts.base import Draft
from models.speculate.tree import Tree
from models.target.target import Target


def measure(
    target: Target, prompts: list[list[int]], tree: Tree, conf: EvaluationConf
) -> Callable[[Draft], dict[str, float]]:
    """A function of the draft: tokens a round, and the share of rounds that got so deep.

    Delivered tokens are those that are kept of the rounds: a user gets nothing of what a draft
    proposes behind the end of an answer. The first token is the prefill's.
    """
    slots = max(len(prompt) for prompt in prompts) + conf.quick_tokens

    def measured(draft: Draft) -> dict[str, float]:
        # eager: compiling would take longer than the few rounds measured here
        verifier = (draft.verifier(target) or target).eager()
        decoder = Decoder(
            verifier, draft, tree, sampling=conf.sampling, slots=slots, batch=len(prompts)
        )
        done = decoder.decode(
            prompts, row_ids=list(range(len(prompts))),
            max_new_tokens=conf.quick_tokens, eos_ids=target.eos_ids,
        )  # fmt: skip
        accepted = [count for row in done for count in row.accepted]
        rounds = max(1, len(accepted))  # none where the first token ends every answer
        reached = {
            f"accepted_{depth}": sum(count >= depth for count in accepted) / rounds
            for depth in range(1, tree.deepest + 1)
        }
        delivered = sum(len(row.ids) - 1 for row in done)
        return {
            "delivered_per_round": delivered / rounds,
            "acceptance_length": 1 + sum(accepted) / rounds,
            **reached,
        }

    return measured
