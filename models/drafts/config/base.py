"""Define the options of every drafting method; no file in this folder imports PyTorch."""

from dataclasses import dataclass
from typing import ClassVar

from models.target.config import ModelSource


@dataclass(frozen=True, kw_only=True)
class FirstStage:
    """A draft to train before the configured one, which starts from its checkpoint."""

    draft: "DraftConf"
    steps: int | None
    epochs: float | None
    lr_scale: float  # factor on the learning rate


@dataclass(kw_only=True)
class DraftConf:
    """The options of a method; subclasses set `method`, `architecture` and `draft_class`."""

    method: ClassVar[str]
    architecture: ClassVar[str]  # the name in config.json that identifies a checkpoint
    draft_class: ClassVar[str]  # module:class of the draft, which is imported when one is built
    vllm_method: ClassVar[str | None] = None  # its name in vLLM, which loads the checkpoint
    depth_key: ClassVar[str] = "max_depth"  # name of the field that limits the proposal depth
    trains_target: ClassVar[bool] = False  # whether weights of the target are trained too
    is_language_model: ClassVar[bool] = False  # whether `Draft.as_language_model` returns one

    @property
    def max_proposal_depth(self) -> int:
        """Return the number of tokens of the deepest proposal."""
        return getattr(self, self.depth_key)

    @property
    def needs_context(self) -> bool:
        """Return `Needs.context` of the drafts that are built from it.

        A method that needs context cannot be trained on split documents.
        """
        return True

    @property
    def pretrained(self) -> ModelSource | None:
        """Return the pretrained model that the draft starts from, or None if there is none."""
        return None

    @property
    def first_stage(self) -> FirstStage | None:
        """Return what is trained before the draft, or None if training begins with it."""
        return None

    def describe_engine_limits(self) -> str | None:
        """Return which engines read the checkpoint, or None if all that read the method do."""
        return None
