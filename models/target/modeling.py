"""All that this project assumes about the inside of transformers' modeling files.

A decoder is run with our masks, positions and cache, and each of its layers through a hook. These
assumptions hold in TESTED_VERSIONS; `tests/models/test_modeling.py` tests each of them by itself,
and `check_modeling` runs a thin model on `meta` before any weight is read:

    the decoder takes its cache as `cache` (from 5.24 on) or `past_key_values`
    it passes its cache, positions and masks on to each layer by name, and hidden states by place
    a layer passes its cache on to its attention, which only calls `update(keys, values, ...)`
    a layer returns the tensor that enters the next one
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache

from models.errors import UserError
from models.target import architectures
from models.target.cache import CacheWrite, StaticCache, write_layer

TESTED_VERSIONS = ("5.23", "5.24")
CACHE_NAMES = ("cache", "past_key_values")


class PresentCache(Cache):
    """A cache that holds nothing: the decoder only asks whether it has one.

    Callers always pass positions, so nothing is derived from the length.
    """

    def __init__(self) -> None:
        self.layers = []

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0


class LayerCache(Cache):
    """One layer's part of the cache, without the other layers, so that all share one graph."""

    def __init__(self, tensors: tuple[Tensor, ...]):
        self.layers = []
        self.tensors = tensors

    def update(
        self, key_states: Float[Tensor, "b h t d"], value_states: Float[Tensor, "b h t d"],
        *_args: object, **_kwargs: object,
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:  # fmt: skip
        """Write the new keys and values, and return every slot."""
        return write_layer(*self.tensors, key_states, value_states)


@dataclass(kw_only=True)
class _ForwardState:
    """The state of one forward pass, which copies of a model share, as they share the layers."""

    layer_inputs: dict[int, Tensor] = field(default_factory=dict)
    cache_write: tuple[StaticCache, CacheWrite] | None = None


@dataclass(kw_only=True)
class _LayerHook:
    """A layer's index and state, kept as its attribute so that a copied model has its own."""

    index: int
    cache_name: str
    forward_state: _ForwardState
    region: Callable


class HookedDecoder:
    """The decoder of a causal LM of transformers, whose layers run through hooks."""

    def __init__(self, model: Any, compile_region: Callable[[Callable], Callable]):
        self.decoder = model.get_decoder()
        self.cache_name = find_cache_name(self.decoder.forward)
        self.state = _ForwardState()
        region = compile_region(_run_layer)
        for i, layer in enumerate(self.decoder.layers):
            layer.hook = _LayerHook(
                index=i, cache_name=self.cache_name, forward_state=self.state, region=region
            )
            # a method bound to the layer, so that a copy of the model runs its own layers
            layer.forward = MethodType(_hooked_forward, layer)

    def __call__(
        self, input_ids: Int[Tensor, "batch seq"], *, positions: Int[Tensor, "batch seq"],
        masks: Any, layers: list[int], cache_write: tuple[StaticCache, CacheWrite] | None,
    ) -> tuple[Float[Tensor, "batch seq hidden"], list[Tensor]]:  # fmt: skip
        """Return the normed hidden states, and the inputs of these layers."""
        # A new dict: graphs must not depend on what an earlier pass left in it.
        self.state.layer_inputs = {}
        self.state.cache_write = cache_write
        hidden = self.decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=cache_write is not None,
            **{self.cache_name: None if cache_write is None else _PRESENT},
        ).last_hidden_state
        captured = [self.state.layer_inputs[i] for i in layers]
        # Otherwise a compiled graph would return every layer's input.
        self.state.layer_inputs = {}
        self.state.cache_write = None
        return hidden, captured


_PRESENT = PresentCache()


def find_cache_name(forward: Callable) -> str:
    """Return the name under which this version's decoders take their cache.

    >>> find_cache_name(lambda hidden_states, cache: None)
    'cache'
    """
    parameters = inspect.signature(forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def _hooked_forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Run a layer: record the tensor that enters it, and pass it its part of the cache.

    The recorder of transformers cannot be traced: it keeps its results in a context variable.
    """
    hook: _LayerHook = layer.hook
    hook.forward_state.layer_inputs[hook.index] = hidden_states
    cache_args = ()
    if hook.forward_state.cache_write is not None:
        cache, write = hook.forward_state.cache_write
        cache_args = cache.layer_args(hook.index, write)
        kwargs = kwargs | {hook.cache_name: None}
    return hook.region(layer, hidden_states, hook.cache_name, cache_args, kwargs)


def _run_layer(
    layer: nn.Module, hidden_states: Tensor, cache_name: str, cache_args: tuple[Tensor, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Run one layer. As its inputs are only tensors and constants, it is traced once for all."""
    if cache_args:
        kwargs = kwargs | {cache_name: LayerCache(cache_args)}
    return type(layer).forward(layer, hidden_states, **kwargs)


def check_modeling(config: Any) -> None:
    """Run one layer of the model without weights, on `meta`, through hook and cache.

    Raise UserError if this version of transformers does not fit our assumptions, or this model.
    """
    thin = copy.deepcopy(config)
    text = thin.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    try:
        _run_thin_model(thin)
    except Exception as error:  # a changed interface may fail in any way
        version = transformers.__version__
        tested = " and ".join(TESTED_VERSIONS)
        cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(
            f"transformers: its decoders must take our cache, masks and positions, as those of "
            f"{tested} do, got {version} with {text.model_type} ({cause}); install the tested "
            "versions: pip install --constraint locks/dev.txt --editable ."
        ) from error


def _run_thin_model(config: Any) -> None:
    text = config.get_text_config()
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    config._attn_implementation = architectures.choose_attention(config)
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        cache = StaticCache(
            layers=1, batch=1, heads=text.num_key_value_heads, slots=4,
            head_size=architectures.get_head_size(text), dtype=model.dtype, device=ids.device,
        )  # fmt: skip
        full = torch.ones((1, 1, 2, 5), dtype=torch.bool)
        in_window = None if architectures.get_sliding_window(text) is None else full
        masks = architectures.build_layer_masks(config, full, in_window, model.dtype)
        hidden, captured = HookedDecoder(model, lambda function: function)(
            ids, positions=ids, masks=masks, layers=[0], cache_write=(cache, CacheWrite.at(ids))
        )
        assert hidden.shape == captured[0].shape, "layers return the next layer's input"
