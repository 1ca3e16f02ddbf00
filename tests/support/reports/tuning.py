"""Build candidates, round costs and prompts for tests of the tuner."""

import numpy as np

from data.eval_prompts.prompts import EvalPrompt
from infer.tuning.candidates import list_candidates
from infer.tuning.cost_model import RoundSeconds
from models.trees.config import TreeConf
from models.trees.tree import TreeKind

TABLE = np.array([[0.6, 0.2, 0.1, 0.05]] * 6)
GIVEN_TREE = TreeConf(kind=TreeKind.static, paths=[[0], [1], [2], [0, 0]])


def considered(*, nodes=(4, 8, 16, 32), copied=4, table=TABLE, lookup=()):
    return list_candidates(
        table, node_budgets=list(nodes), ngram_tokens=copied, user_tree=GIVEN_TREE, ngram_windows=lookup
    )


def costs(*, node_s: float, pass_s: float = 0.0) -> RoundSeconds:
    """Return the timing of a device: a round takes a second, and more for each node and draft pass."""

    def round_seconds(decoder, generation):
        tree, draft = decoder.tree, decoder.draft
        passes = draft.passes(tree.depth) if draft else 0
        return [1.0 + node_s * tree.size + pass_s * passes] * generation.rounds

    return round_seconds


def prompts_of(written):
    return [
        EvalPrompt(id=f"{i}-{cut}", category="all", ids=text[:cut]) for i, text in enumerate(written) for cut in (4, 7)
    ]
