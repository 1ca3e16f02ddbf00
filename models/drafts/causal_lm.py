"""A draft model: any small causal LM with the target's tokenizer; see docs/draft_models.md.

    position t:   tokens up to t   ->   token t+1, compared with the target's distribution at t

The losses, and training on text that the draft generates, are those of DistillSpec (https://arxiv.org/abs/2310.08461).

Axes: B rows, T tokens, H hidden, S slots.
"""

import copy
import json
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from models.batch import Batch
from models.checkpoints.checkpoint import find_non_finite, read_origin, save_draft
from models.checkpoints.tokenizer_files import save_tokenizer
from models.drafts.base import Draft, DraftState, EmittedPath, HeadTerm, LossTerms, Needs, ReadPrompts, require_no_bias
from models.drafts.bases.cached import CachedDecoding, CachePass
from models.drafts.options import CausalLMConf, InitFrom
from models.io.errors import UserError, require
from models.lora import add_adapters, merge_adapters
from models.losses.config import LossConf
from models.losses.loss_weights import shift_left, token_weights
from models.parallel.dtensor import full_tensor
from models.targets import modeling, pretrained
from models.targets.cache import CacheWrite
from models.targets.config import CheckpointSource, ModelSource
from models.targets.language_model import LanguageModel, TargetOutput
from models.targets.target import Target

log = logging.getLogger(__name__)
# Fields that a checkpoint records, so that the draft before distillation can be rebuilt.
RECORDED_FIELDS = ("name", "path", "revision", "layers", "max_depth")


class CausalLMDraft(CachedDecoding):
    """A causal LM with a cache; it reads no features of the target."""

    conf_class = CausalLMConf

    def __init__(self, conf: CausalLMConf, model: Any, target: LanguageModel):
        super().__init__()
        self.conf, self.method = conf, conf.method
        self.needs = Needs(layers=[], hidden=False, context=conf.needs_context)
        self.max_depth = self.trained_depth = conf.max_depth
        self.model = model
        self.lm = LanguageModel(model, device=target.device)
        # Either model may pad its embeddings and head past the tokens of the tokenizer.
        self.vocab_size = min(self.lm.vocab_size, target.vocab_size)
        self._frozen: tuple[nn.Module] = (target.head,)  # inside a tuple it is not a submodule
        self.target_vocab = target.vocab_size

    @classmethod
    def build(cls, conf: CausalLMConf, target: Target, *, loss: LossConf, seed: int) -> "CausalLMDraft":
        """Build the draft before distillation, in fp32; raise UserError for a wrong tokenizer."""
        if conf.init_from is not InitFrom.checkpoint and conf.layers is None:  # the checkpoint records which they are
            conf = replace(conf, layers=choose_layers(target.config, target.num_layers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_initial_model(conf, target).float()
            # Of a multimodal model, drafting reads the text model alone.
            model.requires_grad_(False)
            if conf.lora.rank:
                add_adapters(model.get_decoder(), rank=conf.lora.rank, alpha=conf.lora.alpha)
            else:
                for part in (model.get_decoder(), model.get_output_embeddings()):
                    part.requires_grad_()
        draft = cls(conf, model, target)
        require_no_bias(draft.lm.head, conf.method)
        draft.loss_conf, draft.seed = loss, seed
        return draft

    @classmethod
    def matches_config(cls, config: dict[str, Any]) -> bool:
        """Return whether the checkpoint is a causal LM of transformers."""
        return not modeling.CAUSAL_LM_CLASSES.isdisjoint(config.get("architectures") or [])

    @classmethod
    def load(cls, directory: Path, target: Target) -> "CausalLMDraft":
        metadata, recorded_seed = read_origin(directory, target)
        conf = CausalLMConf(path=str(directory))
        source = CheckpointSource(path=str(directory))
        pretrained.check_pretrained(source)
        check_same_tokenizer(target, source)
        if "start" in metadata:
            origin = json.loads(metadata["start"])
            conf = CausalLMConf(init_from=InitFrom(origin.pop("start")), **origin)
        draft = cls(conf, load_finite_model(source, target.device.dtype), target)
        draft.seed = recorded_seed
        return draft.to(target.head.weight.device)

    def rebuild_untrained(self, target: Target) -> Draft | str:
        if self.seed is None:
            return "the checkpoint does not record what it was started from"
        try:
            untrained = self.build(self.conf, target, loss=self.loss_conf, seed=self.seed)
        except UserError as error:
            return f"the model that the draft was started from cannot be loaded ({error})"
        return untrained.convert_weights(target).eval()

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """Return the ids that both models have, or None if that is all of the target's."""
        if self.vocab_size == self.target_vocab:
            return None
        return torch.arange(self.vocab_size, device=self.lm.head.weight.device)

    def loss_terms(self, batch: Batch, target_output: TargetOutput) -> LossTerms:
        """Return the loss of every answer token, given all tokens before it."""
        ids, mask = self._clamp_ids(batch.input_ids), batch.attention_mask()
        hidden = self.lm.forward_hidden(
            ids, positions=batch.positions, mask=mask, layers=[], recomputes=self.recomputes
        ).hidden
        weight, total_weight = token_weights(batch, conf=self.loss_conf)
        term = HeadTerm(
            draft_hidden=hidden.flatten(0, 1),
            target_hidden_or_topk=target_output.loss_inputs(),
            draft_heads=[self.lm.head.weight[: self.vocab_size]],
            target_head=self._frozen[0],
            weight=weight.flatten(),
            kept_ids=self.kept_ids,
            labels=shift_left(batch.input_ids, 1).flatten(),
            conf=self.loss_conf,
        )
        return LossTerms(weight=total_weight, heads=[term])

    def _clamp_ids(self, input_ids: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """Return ids that the draft has embeddings for: a target may emit an id past these."""
        return input_ids.clamp_max(self.lm.vocab_size - 1)

    def as_language_model(self) -> LanguageModel:
        """Return the model without compilation, which writes ids of the target alone."""
        model = self.lm.eager()
        model.vocab_size, model.logits = self.vocab_size, self.logits
        return model

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> DraftState:
        weight = self.lm.head.weight
        return {
            "cache": self.lm.new_cache(batch, slots),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.lm.hidden_size),
        }

    def num_slots(self, state: DraftState) -> int:
        return state["cache"].num_slots

    def start(self, state: DraftState, prompts: ReadPrompts) -> DraftState:
        ids, count = prompts.ids, prompts.lengths + 1
        tokens = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1)
        tokens = tokens.scatter(1, prompts.lengths[:, None], prompts.first_token[:, None])
        return self.advance(state, EmittedPath(ids=tokens, count=count, target_output=prompts.target_output))

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Tensor, cache_pass: CachePass
    ) -> Float[Tensor, "b t h"]:
        ids, cache, write = self._clamp_ids(tokens), state["cache"], CacheWrite(slots=cache_pass.slots)
        return self.lm.forward_hidden(
            ids, positions=cache_pass.positions, mask=cache_pass.mask, layers=[], cache=cache, write=write
        ).hidden

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        return self.lm.logits(hidden)[..., : self.vocab_size]

    # --- checkpoint -------------------------------------------------------------------------

    def save(self, directory: Path, target: Target, *, writes: bool = True) -> None:
        """Write a Hugging Face directory with merged adapters and the target's tokenizer."""
        if not writes:
            return
        merged = merge_adapters(self.model)
        for name in self.model.all_tied_weights_keys:
            merged.pop(name, None)
        tensors = dict(revert_weight_conversion(self.model, merged))  # as files have experts
        origin = {name: getattr(self.conf, name) for name in RECORDED_FIELDS} | {"start": self.conf.init_from.name}

        def write_extra_files(folder: Path) -> None:
            self.model.generation_config.save_pretrained(folder)
            save_tokenizer(target.tokenizer, folder, files=target.tokenizer_folder)

        save_draft(
            directory,
            tensors,
            target=target,
            seed=self.seed,
            config=self.model.config.to_dict() | {"architectures": [type(self.model).__name__]},
            metadata={"start": json.dumps(origin)},
            write_extra_files=write_extra_files,
        )


def build_initial_model(conf: CausalLMConf, target: Target) -> Any:
    """Build the model from which distillation starts."""
    if conf.init_from is InitFrom.checkpoint:
        if conf.layers is not None:
            log.info("draft: a pretrained model keeps all its layers, draft.layers=%s has no effect", conf.layers)
        check_same_tokenizer(target, conf)
        if target.head.weight.is_meta:  # planning needs shapes only
            return pretrained.build_planning_model(conf, torch.float32)
        return load_finite_model(conf, torch.float32)
    layers = conf.layers or []
    target.check_layers(layers, default=choose_layers(target.config, target.num_layers))
    return prune_layers(target, layers, copy_weights=conf.init_from is InitFrom.pruned)


def load_finite_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Load a model; raise UserError for a NaN or an infinity in its weights.

    Nothing that such a draft proposes would be accepted, and no error would say so.
    """
    model = pretrained.load_model(source, dtype)
    broken = find_non_finite(model)
    require(
        broken is None,
        f"{source.location_key}: weights must be finite, got {source.location!r}, whose {broken} "
        "is not; give an intact model",
    )
    return model


def choose_layers(config: Any, depth: int) -> list[int]:
    """Return a quarter of a model's layers, from the first to the last, with each kind of attention among them.

    Without a layer that attends to all of the text, a draft would see no further than a few windows.
    """
    count = -(-depth // 4)
    layers = [round(i * (depth - 1) / max(count - 1, 1)) for i in range(count)]
    by_layer = [getattr(config, name, None) for name in ("layer_types", "no_rope_layers")]
    kinds = [*zip(*(values for values in by_layer if values), strict=True)] or [()] * depth
    for kind in sorted(set(kinds) - {kinds[layer] for layer in layers}):
        held = Counter(kinds[layer] for layer in layers)
        near = [
            (abs(old - new), place, new)
            for place, old in enumerate(layers)
            for new in range(depth)
            if kinds[new] == kind and held[kinds[old]] > 1
        ]
        if near:
            _, place, new = min(near)
            layers[place] = new
    return sorted(layers)


def prune_layers(target: Target, layers: list[int], *, copy_weights: bool) -> Any:
    """Build a model of only these layers of the target, with their weights or random ones."""
    config = modeling.keep_layers(target.model.config, layers)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized:
        del config.quantization_config  # the draft's weights are plain
    model = type(target.model)._from_config(config, dtype=torch.float32)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    if not copy_weights:
        return model
    prefix = next(name for name, module in target.model.named_modules() if module is target.decoder.layers)
    layer_index = re.compile(rf"(?<=^{re.escape(prefix)}\.)\d+")
    target_weights = target.model.state_dict()
    target_names = {
        name: layer_index.sub(lambda match: str(layers[int(match[0])]), name) for name in model.state_dict()
    }
    missing = [name for name in target_names.values() if name not in target_weights]
    require(
        not (missing and is_quantized),
        f"draft.init_from: needs a target with plain weights, got pruned for {target.name}, which is quantized; choose "
        "draft.init_from=random, or a pretrained draft",
    )
    require(
        not missing,
        f"draft.layers: must keep the kind of each layer in its new place, got {layers}, for which the target lacks "
        f"{missing[:1]}; keep its first layers, or choose draft.init_from=random",
    )
    model.load_state_dict({name: full_tensor(target_weights[origin]) for name, origin in target_names.items()})
    return model


def check_same_tokenizer(target: Target, source: ModelSource) -> None:
    """Raise UserError, with the first difference, unless both models have the same tokens by id.

    Tokens that the target has no embedding for do not count: it never emits them. The draft may lack those added to the
    vocabulary: Gemma 3's smallest model, which sees no images, has no row for their token.
    """
    if target.tokenizer is None:
        return
    target_tokens, draft_tokens = (
        {i: token for token, i in tokenizer.get_vocab().items()}
        for tokenizer in (target.tokenizer, pretrained.load_tokenizer(source))
    )
    rule = f"{source.location_key}: must have the target's tokenizer"
    remedy = "choose a draft of the target's family"
    for i in range(min(target.vocab_size, max([*target_tokens, *draft_tokens]) + 1)):
        if target_tokens.get(i) != draft_tokens.get(i):
            raise UserError(
                f"{rule}, got {source.location!r}, where token {i} is {draft_tokens.get(i)!r} "
                f"instead of {target_tokens.get(i)!r}; {remedy}"
            )
    draft_rows = pretrained.read_model_config(source).get_text_config().vocab_size
    lacking = {i: token for i, token in target_tokens.items() if draft_rows <= i < target.vocab_size}
    last = max(lacking.keys() - target.tokenizer.added_tokens_decoder, default=None)
    require(last is None, f"{rule}, got {source.location!r}, whose embeddings end before token {last}; {remedy}")
    if lacking:
        log.warning("draft: it has no embedding of %s, which it never proposes", ", ".join(lacking.values()))
