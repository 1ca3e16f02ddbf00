"""The names of the acceptance rules and what each promises, for the options and for reports."""

from enum import Enum

from models.io.errors import require
from models.trees.sampling_config import SamplingConf


class Verification(Enum):
    """The name of an acceptance rule, and what it promises; see docs/exactness.md."""

    auto = "auto"  # greedy at temperature 0, else coupled
    greedy = "greedy"
    coupled = "coupled"
    rejection = "rejection"
    block = "block"
    typical = "typical"  # lossy: marked wherever its results are printed

    @property
    def is_lossless(self) -> bool:
        """Return whether emitted tokens have the target's distribution."""
        return self is not Verification.typical

    @property
    def is_ratio_test(self) -> bool:
        """Return whether it accepts with a probability of target / draft."""
        return self in (Verification.rejection, Verification.block)

    def resolve(self, sampling: SamplingConf) -> "Verification":
        """Return the rule that is meant with this sampling."""
        if self is not Verification.auto:
            return self
        return Verification.coupled if sampling.temperature > 0 else Verification.greedy

    def check_sampling(self, sampling: SamplingConf) -> None:
        """Raise UserError unless the rule is proven for this sampling."""
        key, temperature = "evaluation.sampling.temperature", sampling.temperature
        is_greedy = self is Verification.greedy
        require(
            not is_greedy or temperature <= 0,
            f"evaluation.verification: {self.value} needs {key} 0, got {temperature}; take coupled",
        )
        require(
            is_greedy or temperature != 0,
            f"evaluation.verification: {self.value} needs {key} above 0, got {temperature}; raise it or take greedy",
        )
