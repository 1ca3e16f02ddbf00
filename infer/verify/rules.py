"""Build the acceptance rule that is meant by its name.

A rule is called once per round, on the device, by `accept` in infer/engine/steps.py. It accepts one path of a token
tree; all but `typical` are lossless. `docs/exactness.md` has the proofs and the trees that each rule supports.
"""

from infer.verify.base import AcceptanceRule
from infer.verify.config import Verification
from infer.verify.greedy_and_coupled import CoupledRule, GreedyRule, TypicalRule
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.trees.sampling_config import SamplingConf


def build_acceptance_rule(
    verification: Verification, sampling: SamplingConf, *, typical: TypicalRule | None = None
) -> AcceptanceRule:
    """Return the rule that `verification` names; raise UserError if it does not fit `sampling`.

    `typical` has the thresholds of the typical rule.

    >>> build_acceptance_rule(Verification.auto, SamplingConf(temperature=0.7)).name
    'coupled'
    """
    rules = (GreedyRule(), CoupledRule(), RejectionRule(), BlockRule(), typical or TypicalRule())
    (rule,) = (rule for rule in rules if rule.verification is verification.resolve(sampling))
    rule.check(sampling)
    return rule
