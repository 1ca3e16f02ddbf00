"""Hydra (https://arxiv.org/abs/2402.05109): Medusa heads that see the tokens drafted before them.

    head i:  blocks over H_t and the embeddings of tokens t+1 .. t+1+i, then a vocabulary head
             ->  token t+2+i

Hydra++ puts one decoder layer before the heads: it reads all of the target's hidden states up to t
and gives a better H_t. The target's distribution teaches. Tensors have the authors' names, their
spelling included; no serving engine reads them yet.

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
from models.distill.loss_weights import sooner
from models.distill.losses import LossConf
from models.drafts.base import Batch, Loss, Needs, State
from models.drafts.feature import FeatureConf, FeatureDraft, layer_config
from models.drafts.medusa import last_hidden
from models.errors import UserError
from models.layers import DecoderLayer, RMSNorm, attend, start_small
from models.parallel.dtensor import whole
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, grow
from models.target.cache import places, prompt_mask, tree_mask
from models.target.language_model import Seen
from models.target.target import Target

PLAIN, PREFIX = "mlp", "prefix-mlp"  # the authors' names of the two


@dataclass(kw_only=True)
class HydraConf(FeatureConf):
    """How many heads, how deep each is, and whether a decoder layer stands before them."""

    method: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "HydraModel"
    depth_key: ClassVar[str] = "heads"

    heads: int = 4  # tokens that it can propose
    blocks: int = 1  # residual blocks of each head; the paper's Hydra++ has 4
    prefix: bool = True  # Hydra++
    intermediate_size: int | None = None  # of the prefix layer; None = the target's

    def __post_init__(self) -> None:
        for key in ("heads", "blocks"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    @property
    def reads_context(self) -> bool:
        return self.prefix

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "HydraDraft":
        """A new draft: heads that begin at the target's own."""
        config = layer_config(
            target,
            self.architecture,
            intermediate_size=self.intermediate_size,
            hydra_num_heads=self.heads,
            hydra_num_layers=self.blocks,
            hydra_head_arch=PREFIX if self.prefix else PLAIN,
            base_model_name_or_path=target.name,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = HydraDraft(config, target)
        draft.loss_conf, draft.seed = loss, seed
        for head in draft.heads:
            head.load_state_dict({"weight": whole(target.head.weight)})
        return draft.to(target.head.weight.device)

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["HydraConf", "HydraDraft"]:
        draft = HydraDraft(LlamaConfig(**checkpoint.read_config(directory)), target)
        draft.restore(directory, target)
        conf = cls(
            heads=draft.max_depth,
            blocks=draft.config.hydra_num_layers,
            prefix=draft.prefix is not None,
            intermediate_size=draft.config.intermediate_size,
        )
        return conf, draft


class ResBlock(nn.Module):
    """shortcut(x) + silu(linear(x)); a first block reads H and `conditions` embeddings."""

    def __init__(self, size: int, conditions: int = 0):
        super().__init__()
        width = size * (1 + conditions)
        self.linear = nn.Linear(width, size)
        self.res_connection = nn.Linear(width, size) if conditions else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch h"]:
        return self.res_connection(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """The decoder layer of Hydra++, and its own final norm."""

    def __init__(self, config: Any):
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        start_small(self.layers)

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return layer


class HydraDraft(FeatureDraft):
    """The heads, and what stands before them."""

    method = "hydra"

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__(config, target)
        prefix = self.config.hydra_head_arch == PREFIX
        self.needs = Needs(layers=[], hidden=True, context=prefix)
        self.trained_depth = self.max_depth = self.config.hydra_num_heads
        size, blocks = self.config.hidden_size, self.config.hydra_num_layers
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ResBlock(size, 1 + i), *(ResBlock(size) for _ in range(blocks - 1)))
            for i in range(self.max_depth)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(size, self.config.vocab_size, bias=False) for _ in range(self.max_depth)
        )
        self.prefix_embeding_layer = PrefixLayer(config) if prefix else None
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def prefix(self) -> PrefixLayer | None:
        return self.prefix_embeding_layer

    @property
    def heads(self) -> list[nn.Linear]:
        """Vocabulary heads, one for each depth."""
        own: Any = self.hydra_lm_head
        return list(own)

    def embed(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n h"]:
        """The target's own embeddings."""
        return self._frozen[0](ids).to(self._dtype)

    def passes(self, depth: int) -> int:
        """Each head is another, so that the weights are read once."""
        return min(depth, 1)

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        hidden = seen.hidden.to(self._dtype)
        if self.prefix is not None:
            query, key, value = self.prefix.layer.project(
                hidden, self.rotary(hidden, batch.positions)
            )
            attended = attend(query, key, value, batch.attends())
            hidden = self.prefix.norm(self.prefix.layer.finish(hidden, attended))
        embedded, outputs = self.embed(batch.ids), []
        for i, blocks in enumerate(self.hydra_mlp):
            hidden = torch.cat([hidden, sooner(embedded, 1 + i)], -1)
            outputs.append(blocks(hidden))
        return self.distil(outputs, batch, seen, heads=[head.weight for head in self.heads])

    def new_state(self, batch: int, slots: int) -> State:
        weight = self.heads[0].weight
        where: Any = {"dtype": weight.dtype, "device": weight.device}
        size = self.config.hidden_size
        state = {
            "hidden": torch.zeros(batch, size, **where),
            "token": torch.zeros(batch, dtype=torch.int64, device=weight.device),  # the root
        }
        if self.prefix is None:
            return state
        groups, width = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, width)  # one more: the garbage slot
        return state | {
            "keys": torch.zeros(shape, **where),
            "values": torch.zeros(shape, **where),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
        }

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *, lengths: Int[Tensor, " b"],
        first: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        state = state | {"token": first}
        if self.prefix is None:
            return last_hidden(state, seen, lengths)
        count, slots = ids.shape[1], state["keys"].shape[2]
        rows = torch.arange(count, device=ids.device).expand_as(ids)
        state = state | {"lengths": torch.zeros_like(lengths)}
        return self._read(state, seen, rows, prompt_mask(lengths, count, slots), lengths)

    def advance(
        self, state: State, ids: Int[Tensor, "b path"], *, count: Int[Tensor, " b"], seen: Seen
    ) -> State:
        last = ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
        state = state | {"token": torch.where(count > 0, last, state["token"])}
        if self.prefix is None:
            return last_hidden(state, seen, count)
        lengths, slots = state["lengths"], state["keys"].shape[2]
        new = torch.arange(ids.shape[1], device=ids.device)
        causal = (new <= new[:, None]).expand(len(ids), -1, -1)
        rows = lengths[:, None] + new
        return self._read(state, seen, rows, tree_mask(lengths, causal, slots), count)

    def _read(
        self, state: State, seen: Seen, rows: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
        count: Int[Tensor, " b"],
    ) -> State:  # fmt: skip
        """The prefix layer over new positions; `count` of them are kept."""
        assert self.prefix is not None
        hidden = seen.hidden.to(self._dtype)
        query, key, value = self.prefix.layer.project(hidden, self.rotary(hidden, rows))
        where = places(state["keys"], rows.clamp_max(mask.shape[-1] - 1))
        state["keys"][where], state["values"][where] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        hidden = self.prefix.norm(self.prefix.layer.finish(hidden, attended))
        state = state | {"lengths": state["lengths"] + count}
        return last_hidden(state, Seen(hidden=hidden, captured=seen.captured), count)

    def propose(self, state: State, *, tree: Tree, sampler: Sampler) -> Proposal:
        level = 0
        known = torch.cat([state["hidden"], self.embed(state["token"][:, None])[:, 0]], -1)[:, None]

        def logits() -> Float[Tensor, "b w v"]:
            return self.heads[level](self.hydra_mlp[level](known))

        def expand(tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal level, known
            known = known.gather(1, above[:, :, None].expand(-1, -1, known.shape[-1]))
            known = torch.cat([known, self.embed(tokens)], -1)
            level += 1
            return logits()

        return grow(tree, sampler, logits()[:, 0], expand)

    @property
    def _dtype(self) -> torch.dtype:
        return self.heads[0].weight.dtype
