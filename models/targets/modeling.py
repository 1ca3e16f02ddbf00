"""All that this project assumes about the inside of transformers' modeling files.

This holds in the versions that pyproject.toml allows; `tests/models/targets/test_modeling.py` tests each
assumption by itself, and `check_modeling` runs a thin model on `meta` before any weight is read:

    the decoder takes its cache as `cache` (from 5.24 on) or `past_key_values`
    it passes its cache on to each layer by the same name, and hidden states by place
    a layer's attention calls `update(keys, values, ...)` of its cache, and nothing else
    a layer returns the tensor that enters the next one
    the attention of a loaded model can be set by its name
    masks of four dimensions are added to the scores as they are, by layer type where given so

`models/parallel/` reads `_tp_plan` and `_ep_plan` of a model, `head_dim`, `num_key_value_groups`, `k_proj`
and `v_proj` of its attentions, and `num_experts` of its experts, which take hidden states and the indices
and weights of the chosen experts.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from models.io.errors import UserError, first_line
from models.targets import architectures
from models.targets.cache import CacheWrite, LayerArgs, StaticCache, write_layer

CACHE_NAMES = ("cache", "past_key_values")
# A cache that holds nothing: the decoder only asks whether it has one. Callers always pass positions, so nothing is
# derived from its length.
PRESENT = Cache(layers=[])
CAUSAL_LM_CLASSES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


class LayerCache(Cache):
    """One layer's part of the cache, without the other layers, so that all share one graph."""

    def __init__(self, args: LayerArgs):
        self.layers = []
        self.args = args

    def update(
        self,
        key_states: Float[Tensor, "b h t d"],
        value_states: Float[Tensor, "b h t d"],
        *_args: object,
        **_kwargs: object,
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Write the new keys and values, and return every slot."""
        return write_layer(self.args, key_states, value_states)


@dataclass(kw_only=True)
class _ForwardState:
    """The state of one forward pass, which copies of a model share, as they share the layers."""

    layer_inputs: dict[int, Tensor | None] = field(default_factory=dict)  # of the captured layers
    cache_write: tuple[StaticCache, CacheWrite] | None = None
    recomputes: bool = False


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
        model.set_attn_implementation(architectures.choose_attention(model.config))
        self.decoder = model.get_decoder()
        self.cache_name = find_cache_name(self.decoder.forward)
        self.state = _ForwardState()
        region = compile_region(_run_layer)
        for i, layer in enumerate(self.decoder.layers):
            layer.hook = _LayerHook(index=i, cache_name=self.cache_name, forward_state=self.state, region=region)
            # a method bound to the layer, so that a copy of the model runs its own layers
            layer.forward = MethodType(_hooked_forward, layer)

    def __call__(
        self,
        input_ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "batch seq"],
        masks: Any,
        layers: list[int],
        cache_write: tuple[StaticCache, CacheWrite] | None,
        recomputes: bool = False,
    ) -> tuple[Float[Tensor, "batch seq hidden"], list[Tensor]]:
        """Return the normed hidden states, and the inputs of these layers."""
        # A new dict: graphs must not depend on what an earlier pass left in it.
        self.state.layer_inputs = dict.fromkeys(layers)
        self.state.cache_write, self.state.recomputes = cache_write, recomputes
        hidden = self.decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=cache_write is not None,
            **{self.cache_name: None if cache_write is None else PRESENT},
        ).last_hidden_state
        captured = [cast(Tensor, self.state.layer_inputs[i]) for i in layers]
        # Otherwise a compiled graph would return them twice.
        self.state.layer_inputs = {}
        self.state.cache_write = None
        return hidden, captured


def find_cache_name(forward: Callable) -> str:
    """Return the name under which this version's decoders take their cache.

    >>> find_cache_name(lambda hidden_states, cache: None)
    'cache'
    """
    parameters = inspect.signature(forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def _hooked_forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Run a layer: record the tensor that enters it, if it is captured, and pass it its part of the cache.

    The recorder of transformers cannot be traced: it keeps its results in a context variable.
    """
    hook: _LayerHook = layer.hook
    if hook.index in hook.forward_state.layer_inputs:
        hook.forward_state.layer_inputs[hook.index] = hidden_states
    cache_args: LayerArgs = ()
    if hook.forward_state.cache_write is not None:
        cache, write = hook.forward_state.cache_write
        cache_args = cache.layer_args(hook.index, write)
        kwargs = kwargs | {hook.cache_name: None}
    args = (layer, hidden_states, hook.cache_name, cache_args, kwargs)
    if not torch.is_grad_enabled():
        return hook.region(*args)
    # Inductor computes wrong gradients of a repeated region (PyTorch 2.11 to 2.14).
    return recompute_in_backward(_run_layer, *args) if hook.forward_state.recomputes else _run_layer(*args)


def recompute_in_backward(function: Callable, *args: Any) -> Any:
    """Return the function's result; the backward pass calls it again instead of keeping what it computes.

    It must draw no random numbers.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _run_layer(
    layer: nn.Module, hidden_states: Tensor, cache_name: str, cache_args: LayerArgs, kwargs: dict[str, Any]
) -> Any:
    """Run one layer. As its inputs are only tensors and constants, it is traced once for all."""
    if cache_args:
        kwargs = kwargs | {cache_name: LayerCache(cache_args)}
    return type(layer).forward(layer, hidden_states, **kwargs)


_CHECKED: set[str] = set()  # configs whose thin model ran, as JSON


def check_modeling(config: Any, *, name: str, trust_remote_code: bool = False) -> None:
    """Run one layer of the model without weights, on `meta`, through hook and cache.

    Raise UserError, under the key `name`, if the installed transformers or the model's family does
    not meet our assumptions.
    """
    if (key := config.to_json_string()) in _CHECKED:
        return
    try:
        _run_thin_model(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a changed interface may fail in any way
        family, version = config.get_text_config().model_type, transformers.__version__
        raise UserError(
            f"{name}: decoders must take our masks, positions and cache, got {family} of transformers {version}, which "
            f"fails ({type(error).__name__}: {first_line(error)}); choose a model of another family, or install the "
            "tested transformers by pip install --constraint locks/dev.txt --editable ."
        ) from error
    _CHECKED.add(key)


def build_thin_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the model on `meta`, with its first layer alone."""
    with torch.device("meta"):
        # Fused experts multiply in no other precision on this device.
        return AutoModelForCausalLM.from_config(
            keep_layers(config, range(1)), dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )


def keep_layers(config: Any, layers: Sequence[int]) -> Any:
    """Return the config of a model of only these layers, of those that say something of each layer too."""
    kept = copy.deepcopy(config)
    text = kept.get_text_config()
    if dense_layers := getattr(text, "mlp_only_layers", None):  # by number
        text.mlp_only_layers = [new for new, old in enumerate(layers) if old in dense_layers]
    for name, values in text.to_dict().items():
        is_by_layer = "layer" in name and name != "mlp_only_layers" and isinstance(values, list)
        if is_by_layer and len(values) == text.num_hidden_layers:
            setattr(text, name, [values[i] for i in layers])
    text.num_hidden_layers = len(layers)
    return kept


@torch.no_grad()
def _run_thin_model(config: Any, *, trust_remote_code: bool) -> None:
    model = build_thin_model(config, trust_remote_code=trust_remote_code)
    text = model.config.get_text_config()
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    shape = (1, text.num_key_value_heads, 4, architectures.get_head_size(text))
    cache = StaticCache(1, shape, dtype=model.dtype, device=ids.device)
    full = torch.ones((1, 1, 2, 5), dtype=torch.bool, device="meta")
    in_window = None if architectures.get_sliding_window(text) is None else full
    hidden, captured = HookedDecoder(model, lambda function: function)(
        ids,
        positions=ids,
        masks=architectures.build_layer_masks(model.config, full, in_window, model.dtype),
        layers=[0],
        cache_write=(cache, CacheWrite(slots=ids)),
    )
    if not hidden.shape == captured[0].shape == (1, 2, text.hidden_size):
        raise TypeError(f"layers take {captured[0].shape} and the decoder returns {hidden.shape}")


def is_plain_lookup(embeddings: nn.Module) -> bool:
    """Return whether embeddings are rows of a table, which no factor scales as in Gemma."""
    return not isinstance(embeddings, nn.Embedding) or type(embeddings).forward is nn.Embedding.forward


# Of a LlamaConfig, the module that returns the cosines and sines of positions, each `batch seq head`, and the gated
# feed-forward block: down_proj(silu(gate_proj(x)) * up_proj(x)).
build_rotary, build_mlp = LlamaRotaryEmbedding, LlamaMLP
