"""Acceptance rules: each accepts one path of a token tree; all but `typical` are lossless.

The rule is called once per round, on the device, by `accept` in infer/engine/steps.py.
`docs/exactness.md` has the proofs and the trees that each rule supports.
"""

from infer.config import EvaluationConf, Verification
from infer.verify.base import (
    AcceptanceRule,
    AcceptedPath,
    ScoredNodes,
    ScoredTree,
    accept_root,
)
from infer.verify.greedy_and_coupled import CoupledRule, GreedyRule, TypicalRule, walk_choices
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.speculate.config import SamplingConf

RULES = (GreedyRule, CoupledRule, RejectionRule, BlockRule, TypicalRule)

__all__ = [
    "RULES",
    "AcceptanceRule",
    "AcceptedPath",
    "BlockRule",
    "CoupledRule",
    "GreedyRule",
    "RejectionRule",
    "ScoredNodes",
    "ScoredTree",
    "TypicalRule",
    "accept_root",
    "build_acceptance_rule",
    "build_evaluation_rule",
    "walk_choices",
]  # fmt: skip


def build_acceptance_rule(
    verification: Verification, sampling: SamplingConf, *, typical: TypicalRule | None = None
) -> AcceptanceRule:
    """Return the rule that `verification` names; raise UserError if it does not fit `sampling`.

    `typical` has the thresholds of the typical rule.

    >>> build_acceptance_rule(Verification.auto, SamplingConf(temperature=0.7)).name
    'coupled'
    """
    verification = verification.resolve(sampling)
    (build,) = [rule for rule in RULES if rule.verification is verification]
    rule = typical if typical is not None and build is TypicalRule else build()
    rule.check(sampling)
    return rule


def build_evaluation_rule(conf: EvaluationConf) -> AcceptanceRule:
    """Return the acceptance rule of an evaluation, for `Decoder`."""
    typical = TypicalRule(epsilon=conf.typical_epsilon, delta=conf.typical_delta)
    return build_acceptance_rule(conf.verification, conf.sampling, typical=typical)
