"""The options of EAGLE-3 (https://arxiv.org/abs/2503.01840)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from models.drafts.config.one_layer import OneLayerConf
from models.errors import require


@dataclass(kw_only=True)
class Eagle3Conf(OneLayerConf):
    """The options of EAGLE-3; everything else follows from the target."""

    method: ClassVar[str] = "eagle3"
    vllm_method: ClassVar[str | None] = "eagle3"
    architecture: ClassVar[str] = "Eagle3LlamaForCausalLM"
    draft_class: ClassVar[str] = "models.drafts.eagle3:Eagle3Draft"

    layers: list[int] | None = None  # captured layers; None = those of `default_layers`
    # None = the target's; a head of 150,000 tokens costs the draft of an 8B more than its layer
    vocab_size: int | None = 32_000
    train_embeddings: bool = False
    train_head: bool = True  # else the head stays the target's
    # The paper has neither of these norms; docs/studies.md says what they gain.
    norm_before_residual: bool = True  # the residual stream begins with the normed feature
    norm_before_fc: bool = True  # the captured layers are normed together before `fc`
    norm_output: bool = False  # the next step reads the output after the final norm

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.layers is None or all(a < b for a, b in pairwise(self.layers)),
            f"draft.layers: must be strictly increasing, got {self.layers}; "
            "null takes low, middle and high",
        )

    def describe_engine_limits(self) -> str | None:
        """Return which engines read `norm_output`, if it is on."""
        if not self.norm_output:
            return None
        return "draft.norm_output: vLLM reads it, vLLM Neuron does not; false serves both"
