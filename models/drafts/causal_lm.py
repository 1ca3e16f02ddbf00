"""A draft model: any small causal LM with the target's tokenizer, distilled to agree with it.

    row t:   tokens up to t   ->   token t+1, taught by the target's own distribution there

It begins as a checkpoint, as some of the target's own layers, or at random; it is trained whole or
by adapters (LoRA); and it is saved as a plain Hugging Face directory. DistillSpec
(https://arxiv.org/abs/2310.08461): the losses, and training on what the draft itself writes.

Axes: B rows, T tokens, H hidden, S slots.
"""

import copy
import json
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models import checkpoint
from models.distill.loss_weights import sooner, token_weights
from models.distill.losses import LossConf, chunked_distillation
from models.drafts.base import Batch, Draft, DraftConf, Loss, Needs, State
from models.drafts.cached import CachedDraft
from models.errors import UserError
from models.lora import LoraConf, merged
from models.parallel.dtensor import whole
from models.target import architectures
from models.target.cache import Write, prompt_mask
from models.target.language_model import Seen, Source, Transformer
from models.target.target import Target

# what a checkpoint keeps of its config, so that the draft before distillation can be had again
BEGUN = ("start", "name", "path", "revision", "layers", "max_depth")


class Start(Enum):
    """What the draft is before distillation."""

    checkpoint = "checkpoint"  # a pretrained model
    pruned = "pruned"  # `layers` of the target, between its embeddings and its head
    random = "random"  # of the shape of `pruned`, its weights drawn anew


@dataclass(kw_only=True)
class CausalLMConf(DraftConf):
    """Which model, what it starts from, and what of it is trained."""

    method: ClassVar[str] = "causal_lm"
    architecture: ClassVar[str] = "a Hugging Face causal LM"
    speaks: ClassVar[bool] = True

    start: Start = Start.checkpoint
    name: str = ""  # of a pretrained model: a hub name
    path: str | None = None  # of a local copy of it
    revision: str | None = None
    trust_remote_code: bool = False
    layers: list[int] | None = None  # of the target, for pruned and random; None = every fourth
    lora: LoraConf = field(default_factory=LoraConf)
    max_depth: int = 16  # tokens of the deepest proposal

    def __post_init__(self) -> None:
        if self.start is Start.checkpoint and not (self.name or self.path):
            raise UserError(
                "draft.name: must be set for draft.start=checkpoint, got nothing; "
                "give a hub name, or a local copy by draft.path=DIR"
            )
        if self.start is Start.random and self.lora.rank:
            raise UserError(
                f"draft.lora.rank: must be 0 for draft.start=random, got {self.lora.rank}; "
                "random weights must all be trained"
            )
        if self.max_depth < 1:
            raise UserError(f"draft.max_depth: must be at least 1, got {self.max_depth}")

    @property
    def source(self) -> Source:
        return Source(
            key="draft", name=self.name, path=self.path, revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip

    @property
    def reads_context(self) -> bool:
        return False

    def check(self) -> None:
        if self.start is Start.checkpoint:
            self.source.config()

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "CausalLMDraft":
        """The draft before distillation, in fp32. Raises UserError for another tokenizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._model(target).float()
            if self.lora.rank:
                self.lora.adapt(model)
        draft = CausalLMDraft(self, model, target)
        draft.loss_conf, draft.seed = loss, seed
        return draft.to(target.head.weight.device)

    def _model(self, target: Target) -> Any:
        if self.start is Start.checkpoint:
            same_tokens(target, self.source)
            if target.head.weight.is_meta:  # an outline of it is asked for
                return self.source.outline(torch.float32)
            return self.source.model(torch.float32)
        default = list(range(0, target.num_layers, 4))
        layers = self.layers or default
        target.check_layers(layers, default=default)
        return prune(target, layers, weights=self.start is Start.pruned)

    @classmethod
    def reads(cls, config: dict[str, Any]) -> bool:
        known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return bool(known.intersection(config.get("architectures") or []))

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["CausalLMConf", "CausalLMDraft"]:
        metadata = checkpoint.read_metadata(directory)
        checkpoint.check_fits(
            metadata,
            target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint,
        )
        here = cls(path=str(directory))
        here.source.config()
        same_tokens(target, here.source)
        conf = begun(json.loads(metadata["start"])) if "start" in metadata else here
        draft = CausalLMDraft(conf, read_whole(directory, target.device.dtype), target)
        draft.seed = int(metadata["seed"]) if "seed" in metadata else None
        return conf, draft.to(target.head.weight.device)

    def untrained(self, draft: Draft, target: Target) -> Draft | str:
        assert isinstance(draft, CausalLMDraft)
        if draft.seed is None:
            return "the checkpoint does not say what it was started from"
        try:
            before = self.build(target, loss=draft.loss_conf, seed=draft.seed)
        except UserError as error:
            return f"what the draft was started from is not there ({error})"
        return before.to(target.device.dtype).eval()


class CausalLMDraft(CachedDraft):
    """A causal LM. It takes nothing from the target but what the target teaches."""

    method = "causal_lm"

    def __init__(self, conf: CausalLMConf, model: Any, target: Transformer):
        super().__init__()
        self.conf, self.loss_conf = conf, LossConf()
        self.seed: int | None = None
        self.needs = Needs(layers=[], hidden=False, context=False)
        self.max_depth = self.trained_depth = conf.max_depth
        self.model = model
        self.lm = Transformer(model, device=target.device)
        # either side may pad its embeddings and head beyond the tokens of the tokenizer
        self.vocab_size = min(self.lm.vocab_size, target.vocab_size)
        self._frozen: tuple[nn.Module] = (target.head,)  # a tuple, so that it is not a submodule
        self.target_vocab = target.vocab_size

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        if self.vocab_size == self.target_vocab:
            return None
        return torch.arange(self.vocab_size, device=self.lm.head.weight.device)

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        """Every token of an answer, from all before it."""
        hidden = self.lm.see(
            self._known(batch.ids), positions=batch.positions, mask=batch.attends(), layers=[]
        ).hidden
        weight, whole = token_weights(
            batch.answer, batch.document, conf=self.loss_conf, context=batch.context
        )
        total, metrics = chunked_distillation(
            hidden.flatten(0, 1),
            seen.teaches(),
            draft_heads=[self.lm.head.weight[: self.vocab_size]],
            target_head=self._frozen[0],
            weight=weight.flatten(),
            kept_ids=self.kept_ids,
            labels=sooner(batch.ids, 1).flatten(),
            conf=self.loss_conf,
        )
        return Loss(total=total, weight=whole, metrics=metrics)

    def _known(self, ids: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """A target may emit one of its padding rows, for which the draft may have no embedding."""
        return ids.clamp_max(self.lm.vocab_size - 1)

    def speaker(self) -> Transformer:
        lm = copy.copy(self.lm)
        lm.device = lm.device.eager()
        return lm

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> State:
        weight = self.lm.head.weight
        return {
            "cache": self.lm.new_cache(batch, slots),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.lm.hidden_size),
        }

    def slots(self, state: State) -> int:
        return state["cache"].garbage + 1

    def features(self, seen: Seen) -> Float[Tensor, "b t h"]:
        return seen.hidden  # which no pass of a language model reads

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *, lengths: Int[Tensor, " b"],
        first: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        tokens = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1)
        tokens = tokens.scatter(1, lengths[:, None], first[:, None])
        rows = torch.arange(tokens.shape[1], device=ids.device).expand_as(tokens)
        mask = prompt_mask(lengths, tokens.shape[1], self.slots(state))
        none = state | {"lengths": torch.zeros_like(lengths)}
        return self.read(none, tokens, seen, rows=rows, mask=mask, count=lengths + 1)

    def step(
        self, state: State, tokens: Int[Tensor, "b t"], hidden: Tensor, *,  # noqa: ARG002
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """The whole model over its cache."""
        return self.lm.see(
            self._known(tokens), positions=positions, mask=mask, layers=[], cache=state["cache"],
            write=Write.at(slots),
        ).hidden  # fmt: skip

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        return self.lm.logits(hidden)[..., : self.vocab_size]

    # --- checkpoint -------------------------------------------------------------------------

    def save(self, directory: Path, target: Target) -> None:
        """A plain Hugging Face directory, adapters merged, with the target's tokenizer."""
        dtype = target.head.weight.dtype
        tensors = {name: tensor.to(dtype) for name, tensor in merged(self.model).items()}
        if self.model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        config = self.model.config.to_dict() | {
            "architectures": [type(self.model).__name__],
            "dtype": str(dtype).removeprefix("torch."),
        }
        start = {key: getattr(self.conf, key) for key in BEGUN} | {"start": self.conf.start.name}
        own = {"seed": str(self.seed), "start": json.dumps(start)}
        metadata = checkpoint.metadata(target) | own

        def beside(folder: Path) -> None:
            self.model.generation_config.save_pretrained(folder)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(folder)

        checkpoint.save(directory, tensors, config=config, metadata=metadata, beside=beside)


def begun(start: dict[str, Any]) -> CausalLMConf:
    """What a checkpoint says it was started from."""
    given: dict[str, Any] = start | {"start": Start(start["start"])}
    return CausalLMConf(**given)


def prune(target: Target, layers: list[int], *, weights: bool) -> Any:
    """The target with these of its layers alone: its weights copied, or drawn anew."""
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [kinds[i] for i in layers]
    model = type(target.model)._from_config(
        config, dtype=torch.float32, attn_implementation=architectures.implementation(config)
    )
    model.generation_config = copy.deepcopy(target.model.generation_config)
    if not weights:
        return model
    named = target.model.named_modules()
    above = next(name for name, module in named if module is target.decoder.layers)
    place = {str(old): str(new) for new, old in enumerate(layers)}
    number = re.compile(rf"{re.escape(above)}\.(\d+)\.(.*)")
    tensors = {}
    for name, tensor in target.model.state_dict().items():
        if not (found := number.fullmatch(name)):
            tensors[name] = whole(tensor)
        elif found[1] in place:
            tensors[f"{above}.{place[found[1]]}.{found[2]}"] = whole(tensor)
    model.load_state_dict(tensors)
    return model


def read_whole(directory: Path, dtype: torch.dtype) -> Any:
    """A saved model. Raises UserError where a tensor is missing, unknown or not to be read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        attention = architectures.implementation(AutoConfig.from_pretrained(directory))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        model, info = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"checkpoint: must be a whole model, got {directory} ({str(error).splitlines()[0]}); "
            "copy it again or repeat the run"
        ) from error
    for what in ("missing", "unexpected"):
        if names := sorted(info[f"{what}_keys"]):
            raise UserError(
                f"checkpoint: must have the tensors of its config, got {directory} with {what} "
                f"{names[0]}; give the checkpoint folder of another run"
            )
    return model


def same_tokens(target: Target, source: Source) -> None:
    """Raises UserError with the first token that differs: ids must mean the same to both."""
    if target.tokenizer is None:
        return
    sides = (target.tokenizer, source.tokenizer())
    wanted, found = ({i: t for t, i in side.get_vocab().items()} for side in sides)
    rule = f"draft.{'path' if source.path else 'name'}: must have the target's tokenizer"
    remedy = "choose a draft of the target's family"
    for i in range(max([*wanted, *found]) + 1):
        if wanted.get(i) != found.get(i):
            raise UserError(
                f"{rule}, got {source.place!r}, where token {i} is {found.get(i)!r} instead of "
                f"{wanted.get(i)!r}; {remedy}"
            )
    rows = source.config().get_text_config().vocab_size
    if rows <= max(wanted):
        raise UserError(
            f"{rule}, got {source.place!r}, whose embeddings end before token {max(wanted)}; "
            f"{remedy}"
        )
