"""Hydra (https://arxiv.org/abs/2402.05109): Medusa heads that read the tokens drafted so far.

    head i:  blocks over H_t and the embeddings of tokens t+1 .. t+1+i, then a vocabulary head
             ->  token t+2+i

Hydra++ puts a decoder layer before the heads, which attends to the target's hidden states up to t
and returns a better H_t. Tensors have the authors' names and spelling; see docs/heads.md.

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.batch import Batch
from models.drafts.base import DraftState, EmittedPath, Extras, LossTerms, with_last_hidden
from models.drafts.bases.cached import CachedDecoding, CachePass, attend_cached, new_layer_state
from models.drafts.bases.feature import HeadsDraft
from models.drafts.options import HydraConf
from models.io.errors import require
from models.layers import DecoderLayer, RMSNorm, attend, draw_dropout, drop_inputs, init_normal
from models.losses.loss_weights import shift_left
from models.targets.language_model import TargetOutput
from models.targets.modeling import build_rotary
from models.targets.target import Target
from models.trees.growth import Proposal, grow
from models.trees.sampling import Sampler
from models.trees.tree import Tree

HEAD_ARCH_PLAIN, HEAD_ARCH_PREFIX = "mlp", "prefix-mlp"  # the authors' values


class ConditionedBlock(nn.Module):
    """A block shortcut(x) + silu(linear(x)); the first one reads H and `conditions` embeddings."""

    def __init__(self, size: int, conditions: int = 0):
        super().__init__()
        width = size * (1 + conditions)
        self.linear = nn.Linear(width, size)
        self.res_connection = nn.Linear(width, size) if conditions else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch h"]:
        return self.res_connection(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """The decoder layer of Hydra++ and its final norm."""

    def __init__(self, config: Any):
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        init_normal(self.layers)

    def forward(
        self,
        hidden: Float[Tensor, "b t h"],
        rope: tuple[Tensor, Tensor],
        run_attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "b t h"]:
        """Return the normed output; `run_attention` takes the layer's queries, keys and values."""
        layer = cast(DecoderLayer, self.layers[0])
        attended = run_attention(*layer.self_attn.project_qkv(layer.input_layernorm(hidden), rope))
        return self.norm(layer.finish(hidden, attended))


class HydraDraft(CachedDecoding, HeadsDraft):
    """The heads, and the prefix layer of Hydra++."""

    conf_class = HydraConf
    config_keys: ClassVar[dict[str, str]] = {
        "heads": "hydra_num_heads",
        "num_layers": "hydra_num_layers",
        "intermediate_size": "intermediate_size",
    }

    def __init__(self, conf: HydraConf, config: LlamaConfig, target: Target):
        super().__init__(conf, config, target)
        size, blocks = self.config.hidden_size, self.config.hydra_num_layers
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ConditionedBlock(size, 1 + i), *(ConditionedBlock(size) for _ in range(blocks - 1)))
            for i in range(self.max_depth)
        )
        heads = self.max_depth if conf.separate_lm_heads else 1  # the target's, frozen
        self.hydra_lm_head = nn.ModuleList(nn.Linear(size, self.config.vocab_size, bias=False) for _ in range(heads))
        self.hydra_lm_head.requires_grad_(conf.separate_lm_heads)
        # the authors' spelling, in the names of tensors
        self.prefix_embeding_layer = PrefixLayer(config) if conf.prefix else None
        self.rotary = build_rotary(config)

    @classmethod
    def engine_config(cls, conf: HydraConf, target: Target, **overrides: Any) -> LlamaConfig:
        """Build the content of config.json with the authors' keys."""
        return super().engine_config(
            conf,
            target,
            hydra_head_arch=HEAD_ARCH_PREFIX if conf.prefix else HEAD_ARCH_PLAIN,
            original_lm_head=not conf.separate_lm_heads,
            grounded_heads=True,  # Heads read the tokens that were drafted before theirs.
            base_model_name_or_path=target.name,
            **overrides,
        )

    @classmethod
    def fields_from_config(cls, config: Any) -> dict[str, Any]:
        prefix = config.hydra_head_arch == HEAD_ARCH_PREFIX
        return super().fields_from_config(config) | {"prefix": prefix}

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the authors' names; their heads have a bias."""
        tensors = {self._publish_name(name): tensor for name, tensor in self.state_dict().items()}
        heads = {name: tensor for name, tensor in tensors.items() if name.startswith("hydra_lm_head.")}
        biases = {name.removesuffix("weight") + "bias": weight.new_zeros(len(weight)) for name, weight in heads.items()}
        return tensors | biases

    def take_tensors(self, tensors: dict[str, Tensor]) -> None:
        biased = [name for name in tensors if name.startswith("hydra_lm_head.") and name.endswith("bias")]
        require(
            not any(tensors[name].any() for name in biased),
            "checkpoint: vocabulary heads must have no bias but 0, got others; train a draft of this project",
        )
        self.load_state_dict({name: tensors[self._publish_name(name)] for name in self.state_dict()})

    def _publish_name(self, name: str) -> str:
        """Return the authors' name of a tensor: with a prefix, they have a dropout before each block and head."""
        if self.prefix_embeding_layer is None:
            return name
        name = re.sub(r"^(hydra_mlp\.\d+\.)(\d+)", lambda match: f"{match[1]}{2 * int(match[2]) + 1}", name)
        return re.sub(r"^(hydra_lm_head\.\d+)\.", r"\1.1.", name)

    @property
    def heads(self) -> list[nn.Linear]:
        return cast("list[nn.Linear]", list(self.hydra_lm_head))

    def embed(self, input_ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n h"]:
        """Return the target's embeddings of the tokens."""
        return self.target_embeddings(input_ids).to(self.dtype)

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        return target_output.hidden.to(self.dtype)

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        """Return the inputs that dropout keeps: of the first block, the later ones, the head.

        All heads have the same choices, a shorter first block the first of its columns.
        """
        columns = (1 + self.max_depth + self.config.hydra_num_layers) * self.config.hidden_size
        return draw_dropout(generators, (batch.input_ids.shape[1], columns), dropout=self.conf.dropout)

    def loss_terms(
        self, batch: Batch, target_output: TargetOutput, dropout_mask: Bool[Tensor, "b t columns"] | None = None
    ) -> LossTerms:
        """Return the loss of all heads; head i reads the text's tokens t+1 .. t+1+i."""
        hidden = self.target_features(target_output)
        if self.prefix_embeding_layer is not None:
            hidden = self.prefix_embeding_layer(
                hidden, self.rotary(hidden, batch.positions), partial(attend, mask=batch.attention_mask())
            )
        embedded, outputs = self.embed(batch.input_ids), []
        for i, blocks in enumerate(self.hydra_mlp):
            hidden = torch.cat([hidden, shift_left(embedded, 1 + i)], -1)
            outputs.append(self.run_blocks(cast(nn.Sequential, blocks), hidden, dropout_mask))
        return self.distill(outputs, batch, target_output, heads=[head.weight for head in self.heads])

    def run_blocks(
        self, blocks: nn.Sequential, x: Float[Tensor, "b t width"], dropout_mask: Bool[Tensor, "b t columns"] | None
    ) -> Float[Tensor, "b t h"]:
        """Return what a head's vocabulary matrix reads, with dropout before each block and it."""
        size = self.config.hidden_size
        longest = (1 + self.max_depth) * size  # columns of the first block of the last head
        starts = [0, *range(longest, longest + len(blocks) * size, size)]
        for start, block in zip(starts, [*blocks, nn.Identity()], strict=True):
            part = None if dropout_mask is None else dropout_mask[..., start : start + x.shape[-1]]
            x = block(drop_inputs(x, part, dropout=self.conf.dropout))
        return x

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return room for each row's hidden state and root, and the prefix layer's cache."""
        weight, has_prefix = self.heads[0].weight, self.prefix_embeding_layer is not None
        state = new_layer_state(self.config, weight, batch, slots) if has_prefix else super().new_state(batch, slots)
        return state | {"token": weight.new_zeros(batch, dtype=torch.int64)}  # the root

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        """Return the state with the last emitted token and the hidden state before it."""
        count = emitted.count
        last = emitted.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
        state = state | {"token": torch.where(count > 0, last, state["token"])}
        if self.prefix_embeding_layer is None:
            return with_last_hidden(state, self.target_features(emitted.target_output), count)
        return super().advance(state, emitted)

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Tensor, cache_pass: CachePass
    ) -> Float[Tensor, "b t h"]:
        """Run the prefix layer over its cache; it reads hidden states only, no tokens."""
        assert self.prefix_embeding_layer is not None
        rope = self.rotary(hidden, cache_pass.positions)
        return self.prefix_embeding_layer(hidden, rope, partial(attend_cached, state, cache_pass=cache_pass))

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Grow a tree and return it; each level's head also reads the embeddings of the path."""
        # [B, W, H + embeddings of the path]: what the head of the level reads at each node
        known = torch.cat([state["hidden"], self.embed(state["token"][:, None])[:, 0]], -1)[:, None]

        def logits(level: int) -> Float[Tensor, "b w v"]:
            return self.head_of(level)(self.hydra_mlp[level](known))

        def expand(tokens: Tensor, parent_index: Tensor, level: int) -> Tensor:
            nonlocal known
            known = known.gather(1, parent_index[:, :, None].expand(-1, -1, known.shape[-1]))
            known = torch.cat([known, self.embed(tokens)], -1)
            return logits(level)

        return grow(tree, sampler, logits(0)[:, 0], expand)
