"""The frozen target: any Hugging Face causal LM with softmax attention, seen through four verbs.

embed, see (hidden states), logits, new_cache. Captured layer i is the tensor that enters layer i,
which is Hugging Face's `hidden_states[i]` and vLLM's `eagle_aux_hidden_state_layer_ids`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.cache import LayerCache, StaticCache, Write
from models.checkpoint import target_fingerprint, tokenizer_fingerprint
from models.device import Device
from models.errors import UserError

DEMO = Path(__file__).parent.parent / "data" / "demo" / "target"


@dataclass(kw_only=True)
class Seen:
    """What the target computed at each position."""

    hidden: Float[Tensor, "batch seq hidden"]  # after the final norm: what the head reads
    captured: Float[Tensor, "batch seq captured"]  # the captured layers side by side, low to high


@dataclass(kw_only=True)
class _Pass:
    """What the layers take and leave on a pass. Copies of a target share it, with the layers."""

    entering: dict[int, Tensor] = field(default_factory=dict)
    writing: tuple[StaticCache, Write] | None = None


@dataclass(kw_only=True)
class TargetConf:
    """Which model must not change: a hub name, a local path, or `demo`."""

    name: str = "demo"
    revision: str | None = None
    trust_remote_code: bool = False

    def build(self, device: Device) -> "Target":
        """Load and freeze. Raises UserError for what cannot be had or served exactly."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        path = str(DEMO) if self.name == "demo" else self.name
        where = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(path, **where)
            _refuse(config, self.name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=device.dtype, attn_implementation="sdpa", **where
            )
            tokenizer = AutoTokenizer.from_pretrained(path, **where)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(
                f"target.name: must be a reachable model, got {self.name!r} ({reason}); "
                "without a network give the path of a local copy"
            ) from error
        return Target(model.to(device.torch_device), tokenizer, name=self.name, device=device)


class Target:
    """A frozen causal LM. `tokenizer` is None only in tests that deal in ids."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str, device: Device):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.device = tokenizer, name, device
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.head_size: int = (
            getattr(self.config, "head_dim", None)
            or self.hidden_size // self.config.num_attention_heads
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        self.fingerprint = target_fingerprint(model)
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer else ""
        self._pass = _Pass()
        region = device.region(_layer_pass)
        for i, layer in enumerate(self.decoder.layers):
            # bound, so that a copy of the model runs its own layers
            layer.forward = MethodType(self._watched(i, region), layer)
        self._check_head()

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def eager(self) -> "Target":
        """The same target for few rounds, which compiling would only delay."""
        eager = copy.copy(self)
        eager.device = replace(self.device, compiles=False)
        return eager

    def embed(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.head(hidden)

    def new_cache(self, batch: int, slots: int) -> StaticCache:
        """Room for `slots` tokens a row, tree nodes included."""
        return StaticCache(
            layers=self.num_layers,
            batch=batch,
            heads=self.config.num_key_value_heads,
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
        assert self.fingerprint  # read, so that a compiled graph knows whose it is
        # always a new dict: a graph must not depend on what other callers of the layers left in it
        self._pass.entering = {}
        if cache is not None:
            assert write is not None
            self._pass.writing = cache, write
        hidden = self.decoder(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        captured = [self._pass.entering[i] for i in layers]
        self._pass.entering = {}  # else a compiled graph would return every layer's input
        self._pass.writing = None
        return Seen(
            hidden=hidden, captured=torch.cat(captured, -1) if captured else hidden[..., :0]
        )

    def _watched(self, i: int, region: Callable) -> Callable:
        """Layer i, which keeps the tensor that enters it, and is given its part of the cache.

        transformers' own recorder cannot be traced: it holds its results in a context variable.
        """

        def forward(layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
            self._pass.entering[i] = hidden_states
            part = ()
            if self._pass.writing is not None:
                cache, write = self._pass.writing
                kwargs = kwargs | {"past_key_values": None}
                part = cache.layer(i, write)
            return region(layer, hidden_states, part, kwargs)

        return forward

    def check_layers(self, layers: list[int]) -> None:
        """Raises UserError unless each is the input of a layer, in increasing order."""
        if any(b <= a for a, b in pairwise(layers)):
            raise UserError(
                f"draft.layers: must be strictly increasing, got {layers}; "
                "null takes low, middle and high"
            )
        if not layers or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise UserError(
                f"draft.layers: must lie in 0..{self.num_layers - 1} for target {self.name}, "
                f"got {layers}; null takes low, middle and high"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some families scale or cap their logits after the head; those are not served exactly."""
        ids = torch.arange(2, device=self.head.weight.device)[None]
        whole = self.model(input_ids=ids).logits
        ours = self.logits(self.decoder(input_ids=ids).last_hidden_state)
        if not torch.allclose(whole.float(), ours.float(), atol=1e-3, rtol=1e-2):
            raise UserError(
                f"target.name: {type(self.model).__name__} changes its logits after the head and "
                f"cannot be served exactly, got {self.name!r}; choose another target"
            )


def _layer_pass(
    layer: nn.Module, hidden: Tensor, part: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """One layer. Given nothing but tensors and constants, it is traced once for all layers."""
    if part:
        kwargs = kwargs | {"past_key_values": LayerCache(*part)}
    return type(layer).forward(layer, hidden, **kwargs)


def _refuse(config: Any, name: str) -> None:
    """Name what the runtime cannot serve exactly, before any weight is read."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if window := getattr(text, "sliding_window", None):
        kinds.add(f"a window of {window} tokens")
    if config.is_encoder_decoder:
        kinds = {"encoder and decoder"}
    elif not hasattr(text, "num_key_value_heads") or hasattr(text, "kv_lora_rank"):
        kinds = {"no plain key-value heads"}
    if kinds != {"full_attention"}:
        raise UserError(
            f"target.name: only full softmax attention in every layer is served exactly, "
            f"got {name!r} ({text.model_type}: {', '.join(sorted(kinds))}); choose another target"
        )
