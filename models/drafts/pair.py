"""A draft with the target that it was distilled for, and the model that verifies it."""

from dataclasses import dataclass

from models.drafts.base import Draft
from models.target.target import Target


@dataclass(frozen=True, kw_only=True)
class SpeculativePair:
    """A target and its draft."""

    target: Target
    draft: Draft

    @property
    def adapted_target(self) -> Target | None:
        """Return the target that the draft's method has adapted, or None if it adapts none."""
        return self.draft.target_for(self.target)

    @property
    def verifying_target(self) -> Target:
        """Return the target that verifies the draft: the adapted one if there is one."""
        return self.adapted_target or self.target
