"""The options of Medusa-1 (https://arxiv.org/abs/2401.10774)."""

from dataclasses import dataclass
from typing import ClassVar

from models.drafts.config.heads import HeadsConf


@dataclass(kw_only=True)
class MedusaConf(HeadsConf):
    """The options of Medusa-1; everything else follows from the target."""

    method: ClassVar[str] = "medusa"
    vllm_method: ClassVar[str | None] = "medusa"
    architecture: ClassVar[str] = "MedusaModel"
    draft_class: ClassVar[str] = "models.drafts.medusa:MedusaDraft"

    separate_lm_heads: bool = True  # each head has a vocabulary head; False: all share the target's

    def describe_engine_limits(self) -> str | None:
        """Return which releases of vLLM read the checkpoint."""
        return "vLLM reads Medusa heads up to version 0.32; 0.33 removed the method"

    @property
    def needs_context(self) -> bool:
        """Return False: each position is drafted from its own hidden state."""
        return False
