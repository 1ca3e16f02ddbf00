"""Acceptance rules: each accepts one path of a token tree; all but `typical` are lossless.

The rule is called once per round, on the device, by `accept` in infer/engine/rounds.py.
`docs/exactness.md` has the proofs and the trees that each rule supports.
"""

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredTree, Verification
from infer.verify.ratio_test_rules import BlockRule, RejectionRule
from infer.verify.target_choice_rules import CoupledRule, GreedyRule, TypicalRule, walk_choices
from models.speculate.sampling import SamplingConf

__all__ = [
    "AcceptanceRule",
    "AcceptedPath",
    "BlockRule",
    "CoupledRule",
    "GreedyRule",
    "RejectionRule",
    "ScoredTree",
    "TypicalRule",
    "Verification",
    "build_acceptance_rule",
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
    if verification is Verification.auto:
        verification = Verification.coupled if sampling.temperature > 0 else Verification.greedy
    rules = (GreedyRule(), CoupledRule(), RejectionRule(), BlockRule(), typical or TypicalRule())
    (rule,) = [rule for rule in rules if rule.name == verification.value]
    rule.check(sampling)
    return rule
