"""The options of all drafting methods, without PyTorch: each class in `METHODS` is one method."""

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import ClassVar

from models.io.errors import BELOW_ONE, POSITIVE, Rule, at_least, check_values, require
from models.targets.config import ModelSource

EVEN = Rule(
    "must be even and positive",
    lambda size: size > 0 and size % 2 == 0,
    "choose an even size, since positions rotate pairs",
)


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
    has_layers: ClassVar[bool] = False  # whether the loss runs decoder layers, which `optim.recompute` can run again

    @property
    def max_proposal_depth(self) -> int:
        """Return the number of tokens of the deepest proposal."""
        return getattr(self, self.depth_key)

    @property
    def needs_context(self) -> bool:
        """Return whether the draft reads the target's outputs at all positions of a document."""
        return True

    @property
    def trains_heads(self) -> bool:
        """Return whether vocabulary heads learn, of which `parallel.split_heads` gives each process rows."""
        return False

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


@dataclass(kw_only=True)
class LoraConf:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) of every linear layer but the head."""

    rank: int = 0  # 0 adds none
    alpha: float = 32.0  # the adapter's output is scaled by alpha / rank

    def __post_init__(self) -> None:
        check_values(
            self, "draft.lora", rank=at_least(0, "0 trains every weight"), alpha=replace(POSITIVE, remedy="e.g. 32")
        )


class InitFrom(Enum):
    """The origin of a draft model's weights before distillation."""

    checkpoint = "checkpoint"  # a pretrained model
    pruned = "pruned"  # embeddings, head and `layers` of the target
    random = "random"  # the shape of `pruned` with random weights


@dataclass(kw_only=True)
class CausalLMConf(ModelSource, DraftConf):
    """A small language model that drafts for a large one, and the part of it that is trained.

    Name, path and revision are those of a pretrained model, for `init_from=checkpoint`.
    """

    method: ClassVar[str] = "causal_lm"
    vllm_method: ClassVar[str | None] = "draft_model"
    architecture: ClassVar[str] = "a Hugging Face causal LM"
    draft_class: ClassVar[str] = "models.drafts.causal_lm:CausalLMDraft"
    is_language_model: ClassVar[bool] = True
    has_layers: ClassVar[bool] = True
    config_key: ClassVar[str] = "draft"

    init_from: InitFrom = InitFrom.checkpoint
    layers: list[int] | None = None  # of the target, if pruned or random; None = a quarter of them
    lora: LoraConf = field(default_factory=LoraConf)
    max_depth: int = 16  # tokens of the deepest proposal

    def __post_init__(self) -> None:
        require(
            self.init_from is not InitFrom.checkpoint or bool(self.name or self.path),
            "draft.name: must be set for draft.init_from=checkpoint, got nothing; "
            "give a hub name, or a local copy by draft.path=DIR",
        )
        require(
            self.init_from is not InitFrom.random or not self.lora.rank,
            f"draft.lora.rank: must be 0 for draft.init_from=random, got {self.lora.rank}; "
            "random weights must all be trained",
        )
        require(
            self.path is None or self.init_from is InitFrom.checkpoint,
            f"draft.path: must be null for draft.init_from={self.init_from.value}, got {self.path}; to start from it "
            "add draft.init_from=checkpoint",
        )
        check_values(self, "draft", max_depth=at_least(1))

    @property
    def pretrained(self) -> ModelSource | None:
        """Return the model itself, unless it is cut out of the target."""
        return self if self.init_from is InitFrom.checkpoint else None

    @property
    def needs_context(self) -> bool:
        """Return False: the draft reads tokens and nothing of the target."""
        return False


@dataclass(kw_only=True)
class EagleConf(DraftConf):
    """The options of all EAGLE methods; everything else follows from the target."""

    has_layers: ClassVar[bool] = True

    ttt_steps: int = 7  # drafting steps in training
    intermediate_size: int | None = None  # None = the target's
    heads: int | None = None  # None = the target's
    kv_heads: int | None = None  # None = the target's
    head_size: int | None = None  # None = the target's
    dropout: float = 0.0  # share of the layer's inputs that training zeroes
    max_depth: int = 16  # tokens of the deepest proposal
    train_embeddings = False  # else they are the target's; no option but of a subclass with such a field

    def __post_init__(self) -> None:
        sizes = ("ttt_steps", "max_depth", "intermediate_size", "heads", "kv_heads")
        check_values(self, "draft", dropout=BELOW_ONE, head_size=EVEN, **dict.fromkeys(sizes, at_least(1)))


@dataclass(kw_only=True)
class Eagle1Conf(EagleConf):
    """The options of EAGLE-1 (https://arxiv.org/abs/2401.15077) and HASS."""

    method: ClassVar[str] = "eagle1"
    vllm_method: ClassVar[str | None] = "eagle"
    architecture: ClassVar[str] = "EagleLlamaForCausalLM"
    draft_class: ClassVar[str] = "models.drafts.eagle:Eagle1Draft"

    ttt_steps: int = 1  # drafting steps in training; later ones read the draft's features (HASS)
    feature_loss_weight: float = 1.0  # weight of the feature loss
    token_loss_weight: float = 0.1  # weight of the token loss, which `loss` configures
    feature_noise: float = 0.2  # width of the uniform noise on the target's features in training

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("feature_loss_weight", "token_loss_weight", "feature_noise")
        check_values(self, "draft", **dict.fromkeys(names, at_least(0)))


@dataclass(kw_only=True)
class Eagle3Conf(EagleConf):
    """The options of EAGLE-3 (https://arxiv.org/abs/2503.01840)."""

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
        check_values(self, "draft", vocab_size=at_least(1, "null takes all of the target's"))
        require(
            self.layers is None or (bool(self.layers) and all(a < b for a, b in pairwise(self.layers))),
            f"draft.layers: must be strictly increasing and not empty, got {self.layers}; null takes low, middle "
            "and high",
        )

    @property
    def trains_heads(self) -> bool:
        return self.train_head

    def describe_engine_limits(self) -> str | None:
        if not self.norm_output:
            return None
        return "draft.norm_output: vLLM reads it, vLLM Neuron does not; false serves both"


@dataclass(kw_only=True)
class HeadsConf(DraftConf):
    """The options of methods with a head for each token of a proposal."""

    depth_key: ClassVar[str] = "heads"

    heads: int = 5  # one for each token of a proposal
    num_layers: int = 1  # residual blocks of each head
    separate_lm_heads: bool = True  # each head has a vocabulary head; False: all share the target's

    def __post_init__(self) -> None:
        check_values(self, "draft", heads=at_least(1), num_layers=at_least(1))

    @property
    def trains_heads(self) -> bool:
        return self.separate_lm_heads


@dataclass(kw_only=True)
class HydraConf(HeadsConf):
    """The options of Hydra (https://arxiv.org/abs/2402.05109)."""

    method: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "HydraModel"
    draft_class: ClassVar[str] = "models.drafts.hydra:HydraDraft"

    heads: int = 4  # one for each token of a proposal
    prefix: bool = True  # a decoder layer before the heads (Hydra++; the paper has 4 blocks)
    intermediate_size: int | None = None  # of the prefix layer; None = the target's
    dropout: float = 0.0  # share of the inputs of blocks and heads that training zeroes

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "draft", dropout=BELOW_ONE)

    @property
    def needs_context(self) -> bool:
        """Return whether there is a prefix layer: only it reads other positions."""
        return self.prefix


@dataclass(kw_only=True)
class MedusaConf(HeadsConf):
    """The options of Medusa-1 (https://arxiv.org/abs/2401.10774)."""

    method: ClassVar[str] = "medusa"
    vllm_method: ClassVar[str | None] = "medusa"
    architecture: ClassVar[str] = "MedusaModel"
    draft_class: ClassVar[str] = "models.drafts.medusa:MedusaDraft"

    def describe_engine_limits(self) -> str | None:
        return "vLLM reads Medusa heads up to version 0.32; 0.33 removed the method"

    @property
    def needs_context(self) -> bool:
        """Return False: each position is drafted from its own hidden state."""
        return False


@dataclass(kw_only=True)
class Medusa2Conf(MedusaConf):
    """The options of Medusa-2: those of the heads, of the adapters, and of the two loss terms."""

    method: ClassVar[str] = "medusa2"
    trains_target: ClassVar[bool] = True
    has_layers: ClassVar[bool] = True
    draft_class: ClassVar[str] = "models.drafts.medusa2:Medusa2Draft"

    lora: LoraConf = field(default_factory=lambda: LoraConf(rank=32, alpha=16.0))
    keep_weight: float = 1.0  # of the distance to the original target
    heads_weight: float = 0.2  # of the loss of the heads
    heads_warmup: int = 40  # optimizer steps over which `heads_weight` rises; 0 = no ramp
    heads_lr_scale: float = 4.0  # learning rate of the heads / learning rate of the adapters
    heads_steps: int | None = None  # steps of a first stage, which trains the heads alone
    heads_epochs: float | None = None  # passes of that stage, in place of steps; both null = none

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = dict.fromkeys(("keep_weight", "heads_weight", "heads_warmup"), at_least(0))
        positive = dict.fromkeys(("heads_lr_scale", "heads_epochs"), POSITIVE)
        check_values(self, "draft", heads_steps=at_least(1), **weights, **positive)
        check_values(self.lora, "draft.lora", rank=at_least(1, "draft=medusa trains the heads alone"))
        require(
            self.heads_steps is None or self.heads_epochs is None,
            "draft.heads_epochs: must be null if draft.heads_steps is set, got "
            f"{self.heads_epochs} and {self.heads_steps} steps; set one of them to null",
        )

    @property
    def first_stage(self) -> FirstStage | None:
        """Return the training of the heads alone on the target as it is, or None without one."""
        if self.heads_steps is None and self.heads_epochs is None:
            return None
        heads = MedusaConf(heads=self.heads, num_layers=self.num_layers, separate_lm_heads=self.separate_lm_heads)
        return FirstStage(draft=heads, steps=self.heads_steps, epochs=self.heads_epochs, lr_scale=self.heads_lr_scale)


METHODS: dict[str, type[DraftConf]] = {
    conf.method: conf
    # Where a checkpoint fits several, the last of them is the most specific.
    for conf in (CausalLMConf, Eagle1Conf, Eagle3Conf, HydraConf, MedusaConf, Medusa2Conf)
}
