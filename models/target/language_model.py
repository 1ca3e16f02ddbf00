"""Any Hugging Face causal LM with softmax attention, run with our masks, positions and cache.

The target is one, and so is a draft that is a language model of its own. Captured layer i is the
tensor that enters layer i, which is Hugging Face's `hidden_states[i]` and vLLM's
`eagle_aux_hidden_state_layer_ids`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.device import Device
from models.device.graph_budget import key_of
from models.distill.topk_logits import TopK
from models.errors import UserError
from models.parallel import nxd_checkpoint, tensor_parallel
from models.target import architectures
from models.target.cache import LayerCache, StaticCache, Write

SHAPES = Path(__file__).parent / "shapes"


@dataclass(kw_only=True)
class Seen:
    """What a model computed at each position.

    With `teacher`, `hidden` does not teach: it is an input, or has no width.
    """

    hidden: Float[Tensor, "batch seq hidden"]  # after the final norm: what the head reads
    captured: Float[Tensor, "batch seq captured"]  # the captured layers side by side, low to high
    teacher: TopK | None = None  # None: the distributions that the head makes of `hidden`

    def to(self, device: torch.device) -> "Seen":
        return Seen(
            hidden=self.hidden.to(device),
            captured=self.captured.to(device),
            teacher=self.teacher and self.teacher.each(lambda t: t.to(device)),
        )

    def teaches(self) -> Float[Tensor, "rows hidden"] | TopK:
        """What a draft learns from, a row a position: hidden states or likeliest tokens."""
        if self.teacher is None:
            return self.hidden.flatten(0, 1)
        return self.teacher.each(lambda t: t.flatten(0, 1))


@dataclass(kw_only=True)
class _Pass:
    """What the layers take and leave on a pass. Copies of a target share it, with the layers."""

    entering: dict[int, Tensor] = field(default_factory=dict)
    writing: tuple[StaticCache, Write] | None = None


@dataclass(kw_only=True)
class _Place:
    """Where a layer stands: an attribute of the layer, so that a copy of a model has its own."""

    index: int
    shared: _Pass
    region: Callable


class Transformer:
    """A causal LM seen through four verbs: embed, see (hidden states), logits, new_cache."""

    def __init__(self, model: Any, *, device: Device):
        self.model, self.device = model, device
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.num_layers: int = self.config.num_hidden_layers
        self.kv_heads: int = tensor_parallel.key_value_heads(model)  # of this process
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.head_size: int = (
            getattr(self.config, "head_dim", None)
            or self.hidden_size // self.config.num_attention_heads
        )
        self.window = architectures.window(self.config)
        self._pass = _Pass()
        region = device.region(_layer_pass)
        for i, layer in enumerate(self.decoder.layers):
            layer.place = _Place(index=i, shared=self._pass, region=region)
            # bound, so that a copy of the model runs its own layers
            layer.forward = MethodType(_watched, layer)

    @property
    def graph_key(self) -> str:
        """What graphs depend on: models/device/graph_budget.py."""
        return key_of(self.model)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer."""
        return _as_list(self.model.generation_config.eos_token_id)

    def embed(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.head(hidden)

    def new_cache(self, batch: int, slots: int) -> StaticCache:
        """Room for `slots` tokens a row, tree nodes included."""
        return StaticCache(
            layers=self.num_layers,
            batch=batch,
            heads=self.kv_heads,
            slots=slots,
            head_size=self.head_size,
            dtype=self.head.weight.dtype,
            device=self.head.weight.device,
        )

    def see(
        self,
        ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch 1 seq keys"],
        layers: list[int],
        cache: StaticCache | None = None,
        write: Write | None = None,
    ) -> Seen:
        """One forward pass. With a cache, keys and values go where `write` says."""
        # always a new dict: a graph must not depend on what other callers of the layers left in it
        self._pass.entering = {}
        if cache is not None:
            assert write is not None
            self._pass.writing = cache, write
        hidden = self.decoder(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._masks(mask, positions, cache, write),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        captured = [self._pass.entering[i] for i in layers]
        self._pass.entering = {}  # else a compiled graph would return every layer's input
        self._pass.writing = None
        return Seen(
            hidden=hidden, captured=torch.cat(captured, -1) if captured else hidden[..., :0]
        )

    def _masks(
        self, mask: Bool[Tensor, "b 1 t s"], positions: Int[Tensor, "b t"],
        cache: StaticCache | None, write: Write | None,
    ) -> Any:  # fmt: skip
        """What the layers attend to.

        A window is of positions, not of slots: nodes of a tree lie behind one another, and siblings
        share a position.
        """
        near = None
        if self.window is not None:
            keys = positions
            if cache is not None and write is not None:
                keys = cache.place(positions, write)
            near = (positions[:, :, None] - keys[:, None] < self.window)[:, None]
        return architectures.masks(self.config, mask, near, self.head.weight.dtype)


def _watched(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """A layer, which keeps the tensor that enters it, and is given its part of the cache.

    transformers' own recorder cannot be traced: it holds its results in a context variable.
    """
    place: _Place = layer.place
    place.shared.entering[place.index] = hidden_states
    part = ()
    if place.shared.writing is not None:
        cache, write = place.shared.writing
        kwargs = kwargs | {"past_key_values": None}
        part = cache.layer(place.index, write)
    return place.region(layer, hidden_states, part, kwargs)


def _layer_pass(
    layer: nn.Module, hidden: Tensor, part: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """One layer. Given nothing but tensors and constants, it is traced once for all layers."""
    if part:
        kwargs = kwargs | {"past_key_values": LayerCache(*part)}
    return type(layer).forward(layer, hidden, **kwargs)


@dataclass(kw_only=True)
class Source:
    """Where a pretrained model is: a hub name, or `path`, a local copy of it."""

    key: str  # of the config: `target` or `draft`
    name: str
    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def place(self) -> str:
        return self.path or self.name

    def config(self) -> Any:
        """Read config.json alone. Raises UserError for what cannot be had or served exactly."""
        from transformers import AutoConfig

        config = self._read(AutoConfig)
        _refuse(config, self)
        return config

    def shape(self) -> Any:
        """The model without weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config(), trust_remote_code=self.trust_remote_code
            )

    def model(self, dtype: torch.dtype, **layout: Any) -> Any:
        """Read the weights; `layout` is of transformers, where a process reads a part of them."""
        from transformers import AutoModelForCausalLM

        config = self.config()
        how = {"dtype": dtype, "attn_implementation": architectures.implementation(config)}
        if self.path and (shares := nxd_checkpoint.files(Path(self.path))):
            return nxd_checkpoint.load(shares, self.shape(), **how, **layout)
        return self._read(AutoModelForCausalLM, **how, **architectures.stored_as(config), **layout)

    def outline(self, dtype: torch.dtype) -> Any:
        """The model without its weights, on `meta`.

        Reads config.json alone; of the models that conf/ names it is here, as published.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        shipped = SHAPES / f"{self.name}.json"
        if self.path is None and shipped.exists():
            config = AutoConfig.for_model(**json.loads(shipped.read_text()))
        else:
            config = self.config()
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=architectures.implementation(config)
            )

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._read(AutoTokenizer)

    def context(self) -> int | None:
        """Tokens of a text that the model has positions for, where it says so."""
        return getattr(self.config().get_text_config(), "max_position_embeddings", None)

    def eos_ids(self) -> list[int]:
        """Ids that end an answer, without the weights: as `Transformer.eos_ids`."""
        from transformers import GenerationConfig

        place = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            generation = GenerationConfig.from_pretrained(self.place, **place)
        except OSError:  # of a model without generation_config.json
            generation = GenerationConfig.from_model_config(self.config())
        return _as_list(generation.eos_token_id)

    def _ask_hub(self) -> None:
        """Ask one quick question: reading would retry for half a minute before it gives up."""
        from huggingface_hub import HfApi, constants, try_to_load_from_cache

        if self.path is not None:
            raise OSError("no such directory")
        cached = try_to_load_from_cache(self.place, "config.json", revision=self.revision)
        if not (constants.HF_HUB_OFFLINE or isinstance(cached, str)):
            HfApi().model_info(self.place, revision=self.revision, timeout=10)

    def _read(self, kind: Any, **kwargs: Any) -> Any:
        from huggingface_hub.errors import HTTPError

        try:
            if not Path(self.place).is_dir():
                self._ask_hub()
            return kind.from_pretrained(
                self.place, revision=self.revision, trust_remote_code=self.trust_remote_code,
                **kwargs,
            )  # fmt: skip
        except (OSError, ValueError, HTTPError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(
                f"{self.key}.{'path' if self.path else 'name'}: must be a reachable model, "
                f"got {self.place!r} ({reason}); "
                f"without a network give a local copy by {self.key}.path=DIR"
            ) from error


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _refuse(config: Any, source: Source) -> None:
    """Name what the runtime cannot serve exactly, before any weight is read."""
    if found := architectures.unserved(config):
        raise UserError(
            f"{source.key}.name: only softmax attention, full or over a sliding window, is served "
            f"exactly, got {source.place!r} ({config.get_text_config().model_type}: "
            f"{', '.join(found)}); choose another {source.key}"
        )
