"""Hydra (https://arxiv.org/abs/2402.05109): Medusa heads that read the tokens drafted so far.

    head i:  blocks over H_t and the embeddings of tokens t+1 .. t+1+i, then a vocabulary head
             ->  token t+2+i

Hydra++ puts one decoder layer before the heads, which attends to the target's hidden states up to t
and returns a better H_t. The loss compares with the target's distribution. Tensors have the
authors' names and spelling; no serving engine reads them yet.

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models import checkpoint
from models.distill.loss_weights import shift_left
from models.distill.losses import LossConf
from models.drafts.base import Batch, DraftState, Loss, Needs
from models.drafts.feature import FeatureConf, FeatureDraft, layer_config
from models.drafts.medusa import store_last_hidden
from models.errors import UserError
from models.layers import DecoderLayer, RMSNorm, attend, init_normal
from models.parallel.dtensor import full_tensor
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, grow
from models.target.cache import prompt_mask, slot_index, tree_mask
from models.target.language_model import TargetOutput
from models.target.target import Target

HEAD_ARCH_PLAIN, HEAD_ARCH_PREFIX = "mlp", "prefix-mlp"  # the authors' values


@dataclass(kw_only=True)
class HydraConf(FeatureConf):
    """The options of Hydra; everything else follows from the target."""

    method: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "HydraModel"
    depth_key: ClassVar[str] = "heads"

    heads: int = 4  # one for each token of a proposal
    blocks: int = 1  # residual blocks of each head; 4 in the paper's Hydra++
    prefix: bool = True  # a decoder layer before the heads (Hydra++)
    intermediate_size: int | None = None  # of the prefix layer; None = the target's

    def __post_init__(self) -> None:
        for key in ("heads", "blocks"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    @property
    def needs_context(self) -> bool:
        """Return whether there is a prefix layer: only it reads other rows."""
        return self.prefix

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "HydraDraft":
        """Build a new draft, whose heads start as the target's."""
        config = layer_config(
            target,
            self.architecture,
            intermediate_size=self.intermediate_size,
            hydra_num_heads=self.heads,
            hydra_num_layers=self.blocks,
            hydra_head_arch=HEAD_ARCH_PREFIX if self.prefix else HEAD_ARCH_PLAIN,
            base_model_name_or_path=target.name,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = HydraDraft(config, target)
        draft.loss_conf, draft.seed = loss, seed
        for head in draft.heads:
            head.load_state_dict({"weight": full_tensor(target.head.weight)})
        return draft.to(target.head.weight.device)

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["HydraConf", "HydraDraft"]:
        """Load a checkpoint; raise UserError for another target, tokenizer or layout."""
        draft = HydraDraft(LlamaConfig(**checkpoint.read_config(directory)), target)
        draft.restore(directory, target)
        conf = cls(
            heads=draft.max_depth,
            blocks=draft.config.hydra_num_layers,
            prefix=draft.prefix_layer is not None,
            intermediate_size=draft.config.intermediate_size,
        )
        return conf, draft


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

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return layer


class HydraDraft(FeatureDraft):
    """The heads, and the prefix layer of Hydra++."""

    method = "hydra"

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__(config, target)
        prefix = self.config.hydra_head_arch == HEAD_ARCH_PREFIX
        self.needs = Needs(layers=[], hidden=True, context=prefix)
        self.trained_depth = self.max_depth = self.config.hydra_num_heads
        size, blocks = self.config.hidden_size, self.config.hydra_num_layers
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ConditionedBlock(size, 1 + i), *(ConditionedBlock(size) for _ in range(blocks - 1))
            )
            for i in range(self.max_depth)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(size, self.config.vocab_size, bias=False) for _ in range(self.max_depth)
        )
        self.prefix_embeding_layer = PrefixLayer(config) if prefix else None
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def prefix_layer(self) -> PrefixLayer | None:
        return self.prefix_embeding_layer

    @property
    def heads(self) -> list[nn.Linear]:
        """Return the vocabulary heads, one for each depth."""
        heads: Any = self.hydra_lm_head
        return list(heads)

    def embed(self, input_ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n h"]:
        """Return the target's embeddings of the tokens."""
        return self._frozen[0](input_ids).to(self._dtype)

    def passes(self, depth: int) -> int:
        """Return at most 1: a proposal reads each weight once, as each depth has its own head."""
        return min(depth, 1)

    def loss(self, batch: Batch, target_output: TargetOutput) -> Loss:
        """Compute the loss of all heads; head i reads the text's tokens t+1 .. t+1+i."""
        hidden = target_output.hidden.to(self._dtype)
        if self.prefix_layer is not None:
            query, key, value = self.prefix_layer.layer.project_qkv(
                hidden, self.rotary(hidden, batch.positions)
            )
            attended = attend(query, key, value, batch.attention_mask())
            hidden = self.prefix_layer.norm(self.prefix_layer.layer.finish(hidden, attended))
        embedded, outputs = self.embed(batch.input_ids), []
        for i, blocks in enumerate(self.hydra_mlp):
            hidden = torch.cat([hidden, shift_left(embedded, 1 + i)], -1)
            outputs.append(blocks(hidden))
        return self.distill(
            outputs, batch, target_output, heads=[head.weight for head in self.heads]
        )

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return room for hidden state and root of each row, and the prefix layer's cache."""
        weight = self.heads[0].weight
        options: Any = {"dtype": weight.dtype, "device": weight.device}
        size = self.config.hidden_size
        state = {
            "hidden": torch.zeros(batch, size, **options),
            "token": torch.zeros(batch, dtype=torch.int64, device=weight.device),  # the root
        }
        if self.prefix_layer is None:
            return state
        groups, width = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, width)  # the last slot is the garbage slot
        return state | {
            "keys": torch.zeros(shape, **options),
            "values": torch.zeros(shape, **options),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
        }

    def start(
        self, state: DraftState, input_ids: Int[Tensor, "b prompt"], *,
        lengths: Int[Tensor, " b"], first_token: Int[Tensor, " b"], target_output: TargetOutput,
    ) -> DraftState:  # fmt: skip
        """Keep the first token and the hidden state before it."""
        state = state | {"token": first_token}
        if self.prefix_layer is None:
            return store_last_hidden(state, target_output, lengths)
        count, slots = input_ids.shape[1], state["keys"].shape[2]
        positions = torch.arange(count, device=input_ids.device).expand_as(input_ids)
        state = state | {"lengths": torch.zeros_like(lengths)}
        return self._extend_state(
            state, target_output, positions, prompt_mask(lengths, count, slots), lengths
        )

    def advance(
        self,
        state: DraftState,
        input_ids: Int[Tensor, "b path"],
        *,
        count: Int[Tensor, " b"],
        target_output: TargetOutput,
    ) -> DraftState:
        """Keep the last emitted token and the hidden state before it."""
        last = input_ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
        state = state | {"token": torch.where(count > 0, last, state["token"])}
        if self.prefix_layer is None:
            return store_last_hidden(state, target_output, count)
        lengths, slots = state["lengths"], state["keys"].shape[2]
        new = torch.arange(input_ids.shape[1], device=input_ids.device)
        causal = (new <= new[:, None]).expand(len(input_ids), -1, -1)
        positions = lengths[:, None] + new
        return self._extend_state(
            state, target_output, positions, tree_mask(lengths, causal, slots), count
        )

    def _extend_state(
        self,
        state: DraftState,
        target_output: TargetOutput,
        positions: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b 1 t s"],
        count: Int[Tensor, " b"],
    ) -> DraftState:
        """Run the prefix layer over new positions, and keep the first `count` of them."""
        assert self.prefix_layer is not None
        hidden = target_output.hidden.to(self._dtype)
        query, key, value = self.prefix_layer.layer.project_qkv(
            hidden, self.rotary(hidden, positions)
        )
        index = slot_index(state["keys"], positions.clamp_max(mask.shape[-1] - 1))
        state["keys"][index], state["values"][index] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        hidden = self.prefix_layer.norm(self.prefix_layer.layer.finish(hidden, attended))
        state = state | {"lengths": state["lengths"] + count}
        return store_last_hidden(
            state, TargetOutput(hidden=hidden, captured=target_output.captured), count
        )

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Grow a tree; the head of each level also reads the embeddings of the path so far."""
        level = 0
        # [B, W, H + embeddings of the path]: what the head of the level reads at each node
        known = torch.cat([state["hidden"], self.embed(state["token"][:, None])[:, 0]], -1)[:, None]

        def logits() -> Float[Tensor, "b w v"]:
            return self.heads[level](self.hydra_mlp[level](known))

        def expand(tokens: Tensor, parent_index: Tensor) -> Tensor:
            nonlocal level, known
            known = known.gather(1, parent_index[:, :, None].expand(-1, -1, known.shape[-1]))
            known = torch.cat([known, self.embed(tokens)], -1)
            level += 1
            return logits()

        return grow(tree, sampler, logits()[:, 0], expand)

    @property
    def _dtype(self) -> torch.dtype:
        return self.heads[0].weight.dtype
