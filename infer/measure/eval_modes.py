"""What competes in an evaluation: the target alone, n-gram lookup, and each draft in its modes."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.eval_prompts.prompts import EvalPrompt
from infer.config import EvaluationConf
from infer.context import check_context
from infer.engine.decode import Decoder
from infer.verify import Verification, build
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.errors import UserError
from models.speculate.tree import Tree, TreeConf, TreeKind
from models.target.target import Target

log = logging.getLogger(__name__)
PLAIN = "autoregressive"


@dataclass(kw_only=True)
class Candidate:
    """A draft to judge, and itself before distillation (or why that cannot be had).

    `target` is its own, where its method adapted one: that verifies it, and is compared with.
    """

    name: str
    draft: Draft
    untrained: Draft | str
    target: Target | None = None
    directory: Path | None = None  # of its checkpoint

    @property
    def baseline(self) -> str:
        """The autoregressive mode that its speed and its answers are compared with."""
        return f"{self.name}/{PLAIN}" if self.target else PLAIN


@dataclass(kw_only=True)
class Contender:
    """A mode: how it decodes, and the autoregressive mode of the same target."""

    decoder: Decoder
    baseline: str
    timed: bool = True  # its rounds are taken apart

    @property
    def compares(self) -> bool:
        """Whether its answers and its baseline's come of the same chance, token for token."""
        return not self.decoder.plan.verifier.ratio

    @property
    def draft_passes(self) -> int | None:
        draft = self.decoder.draft
        return draft and draft.passes(self.decoder.tree.depth)


def contenders(
    target: Target, candidates: list[Candidate], tree: Tree, prompts: list[EvalPrompt],
    conf: EvaluationConf,
) -> dict[str, Contender]:  # fmt: skip
    """All modes by name. What is not a draft's keeps the target's own answers."""
    chain = TreeConf(kind=TreeKind.chain, depth=tree.depth).build()
    slots = max(len(prompt.ids) for prompt in prompts) + conf.new_tokens
    check_context(target, slots)
    decoder = partial(Decoder, sampling=conf.sampling, slots=slots)
    exact = build(Verification.auto, conf.sampling)
    sharing = [c.draft.needs.layers for c in candidates if c.target is None]
    # what is not trained captures the least that some draft does: it shares that draft's graphs
    least = min(sharing, key=len, default=[])
    lookup = decoder(target, NgramDraft(), chain, layers=least, verification=exact)
    modes = {
        PLAIN: Contender(decoder=decoder(target, layers=least), baseline=PLAIN),
        "ngram": Contender(decoder=lookup, baseline=PLAIN),
    }
    for c in candidates:
        own = c.target or target
        if c.target:
            alone = decoder(own, layers=c.draft.needs.layers)
            modes[c.baseline] = Contender(decoder=alone, baseline=c.baseline)
        tried = {
            "untrained": (c.untrained, tree),
            "chain": (c.draft, chain),
            "tree": (c.draft, tree),
        }
        for name, (draft, shape) in tried.items():
            if isinstance(draft, Draft):
                modes[f"{c.name}/{name}"] = Contender(
                    decoder=decoder(own, draft, shape, verification=conf.verifier),
                    baseline=c.baseline,
                    timed=name != "untrained",  # it costs what the trained tree does
                )
    return modes


def check_depth(candidates: list[Candidate], tree: Tree) -> None:
    """Of several drafts, say which of them the tree is too deep for."""
    for c in candidates:
        if len(candidates) > 1 and tree.depth > c.draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {c.draft.max_depth} tokens that {c.name} can "
                f"propose, got {tree.depth}; lower tree.depth or leave {c.name} out"
            )


def warn_depth(name: str, decoder: Decoder) -> None:
    """Of trees deeper than the draft was trained for."""
    depth = decoder.tree.depth
    trained = decoder.draft.trained_depth if decoder.draft else depth
    if depth > trained and name.endswith("/tree"):
        log.warning(
            "tree.depth: %d is deeper than the %d steps that %s was trained for; "
            "deep nodes are rarely accepted",
            depth, trained, name.removesuffix("/tree"),
        )  # fmt: skip
