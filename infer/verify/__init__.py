"""Accept one path of a token tree: rules with one interface, each with its proof, one without.

`docs/exactness.md` says which rule is proven for which tree.
"""

from infer.verify.base import Accepted, Scored, Verification, Verifier
from infer.verify.block import Block
from infer.verify.rejection import Rejection
from infer.verify.typical import Typical, walk_typical
from infer.verify.walk import Coupled, Greedy, walk
from models.speculate.sampling import SamplingConf

__all__ = [
    "Accepted", "Block", "Coupled", "Greedy", "Rejection", "Scored", "Typical", "Verification",
    "Verifier", "build", "walk", "walk_typical",
]  # fmt: skip


def build(
    verification: Verification, sampling: SamplingConf, *, typical: Typical | None = None
) -> Verifier:
    """The rule of that name; `typical` says how likely is likely enough, where that is asked for.

    >>> build(Verification.auto, SamplingConf(temperature=0.7)).name
    'coupled'
    """
    if verification is Verification.auto:
        verification = Verification.coupled if sampling.temperature > 0 else Verification.greedy
    rules = (Greedy(), Coupled(), Rejection(), Block(), typical or Typical())
    (rule,) = [rule for rule in rules if rule.name == verification.value]
    rule.check(sampling)
    return rule
