"""Build the modes of an evaluation: the target alone, n-gram lookup, and those of each draft."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.engine.decode import Decoder, build_acceptance_rule
from infer.measure.context_limits import check_context
from infer.results.records import AUTOREGRESSIVE
from infer.verify.base import AcceptanceRule
from infer.verify.greedy_and_coupled import TypicalRule
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.io.errors import require
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.tree import MAX_CHAIN_LENGTH, Tree, TreeKind

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TunedDecoding:
    """The decoding that the tuner chose for a draft: with it, by n-gram lookup, or with neither."""

    description: str
    draft: Draft | None
    tree: Tree


@dataclass(kw_only=True)
class DraftUnderTest:
    """A draft to evaluate, with its version before distillation, or why there is none.

    The adapted target, if the draft's method trains one, verifies the draft and is its baseline.
    """

    name: str
    draft: Draft
    untrained: Draft | str
    adapted_target: Target | None = None
    directory: Path | None = None  # directory of its checkpoint
    tuned: TunedDecoding | None = None

    @property
    def baseline(self) -> str:
        """Return the name of the autoregressive mode that speed and answers are compared with."""
        return f"{self.name}/{AUTOREGRESSIVE}" if self.adapted_target else AUTOREGRESSIVE


@dataclass(kw_only=True)
class EvalMode:
    """A mode: its decoder, and the name of the autoregressive mode of the same target."""

    decoder: Decoder
    baseline: str
    timed: bool = True  # whether the phases of its rounds are timed


def build_eval_modes(
    target: Target, candidates: list[DraftUnderTest], tree: Tree, prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, EvalMode]:
    """Return all modes by name; raise UserError if prompts and answers exceed the context.

    The autoregressive and n-gram modes always use the decoder's own rule, which keeps the target's own answers.
    """
    chain, copied = (TreeConf(kind=TreeKind.chain, depth=depth).build() for depth in (tree.depth, lookup_depth(tree)))
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    check_context(getattr(target.config, "max_position_embeddings", None), slots)
    build_decoder = partial(Decoder, sampling=conf.sampling, slots=slots)
    # Modes without a draft capture the fewest layers that any draft needs, so that they share the
    # graphs of that draft.
    fewest_layers = min((c.draft.needs.layers for c in candidates if c.adapted_target is None), key=len, default=[])
    modes = {
        AUTOREGRESSIVE: EvalMode(decoder=build_decoder(target, layers=fewest_layers), baseline=AUTOREGRESSIVE),
        "ngram": EvalMode(
            decoder=build_decoder(target, NgramDraft(), copied, layers=fewest_layers), baseline=AUTOREGRESSIVE
        ),
    }
    for candidate in candidates:
        verifier, baseline = candidate.adapted_target or target, candidate.baseline
        layers = candidate.draft.needs.layers
        if candidate.adapted_target:
            modes[baseline] = EvalMode(decoder=build_decoder(verifier, layers=layers), baseline=baseline)
        drafts: dict[str, tuple[Draft | str | None, Tree]] = {
            "untrained": (candidate.untrained, tree),
            "chain": (candidate.draft, chain),
            "tree": (candidate.draft, tree),
        }
        if candidate.tuned:
            drafts["tuned"] = (candidate.tuned.draft, candidate.tuned.tree)
        for name, (draft, draft_tree) in drafts.items():
            if isinstance(draft, str):
                continue
            rule = build_evaluation_rule(conf)
            decoder = build_decoder(verifier, draft, draft_tree, layers=layers, acceptance_rule=rule)
            is_timed = name != "untrained"  # its rounds cost as much as the trained tree's
            modes[f"{candidate.name}/{name}"] = EvalMode(decoder=decoder, baseline=baseline, timed=is_timed)
    return modes


def lookup_depth(tree: Tree) -> int:
    """Return the tokens that n-gram lookup copies beside a tree: as deep as that, or as many as it can."""
    return min(tree.depth, MAX_CHAIN_LENGTH)


def build_evaluation_rule(conf: EvaluationConf) -> AcceptanceRule:
    """Return the acceptance rule of an evaluation, for `Decoder`."""
    typical = TypicalRule(epsilon=conf.typical_epsilon, delta=conf.typical_delta)
    return build_acceptance_rule(conf.verification, conf.sampling, typical=typical)


def check_tree_depth(candidates: list[DraftUnderTest], tree: Tree) -> None:
    """Raise UserError, with its name, if the tree is too deep for one of several drafts; Decoder checks a single."""
    for candidate in candidates:
        require(
            len(candidates) == 1 or tree.depth <= candidate.draft.max_depth,
            f"tree.depth: must be at most the {candidate.draft.max_depth} tokens that {candidate.name} can propose, "
            f"got {tree.depth}; lower tree.depth or leave {candidate.name} out",
        )


def warn_tree_depth(tree: Tree, draft: Draft, name: str) -> None:
    """Log a warning if a tree is deeper than its draft was trained for."""
    if tree.depth > draft.trained_depth:
        line = "tree.depth: %d is deeper than the %d steps that %s was trained for; deep nodes are rarely accepted"
        log.warning(line, tree.depth, draft.trained_depth, name)
