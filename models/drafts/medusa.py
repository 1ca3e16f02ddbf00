"""Medusa-1 (https://arxiv.org/abs/2401.10774): heads on the target's last hidden state.

    head i:  residual blocks over H_t, then a vocabulary head   ->   token t+2+i

The heads are independent of one another: the probability of a proposed path is the product of
theirs, and a tree takes the likeliest paths. H_t is the input of the target's own head, after the
final norm. Blocks start as the identity and heads as the target's. Checkpoints have the layout that
vLLM's loader reads.

Axes: B rows, T tokens, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from models import checkpoint
from models.distill.losses import LossConf
from models.drafts.base import Batch, DraftState, Loss, Needs
from models.drafts.feature import FeatureConf, FeatureDraft
from models.errors import UserError
from models.parallel.dtensor import full_tensor
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, grow
from models.target.language_model import TargetOutput
from models.target.target import Target


class MedusaConfig(SimpleNamespace):
    """The content of config.json; transformers has no class for this model type."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of config.json."""
        return dict(vars(self))


@dataclass(kw_only=True)
class MedusaConf(FeatureConf):
    """The options of Medusa-1; everything else follows from the target."""

    method: ClassVar[str] = "medusa"
    architecture: ClassVar[str] = "MedusaModel"
    depth_key: ClassVar[str] = "heads"

    heads: int = 5  # one for each token of a proposal
    blocks: int = 1  # residual blocks of each head
    own_heads: bool = True  # each head has a vocabulary head; False: all share the target's

    def __post_init__(self) -> None:
        for key in ("heads", "blocks"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    @property
    def needs_context(self) -> bool:
        """Return False: each row is drafted from its own hidden state."""
        return False

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "MedusaDraft":
        """Build a new draft, whose heads all predict what the target's head predicts."""
        draft = MedusaDraft(MedusaConfig(**self.engine_config(target)), target)
        draft.loss_conf, draft.seed = loss, seed
        for head in draft.heads:
            head.load_state_dict({"weight": full_tensor(target.head.weight)})
        return draft.to(target.head.weight.device)

    def engine_config(self, target: Target) -> dict[str, Any]:
        """Build the content of config.json as vLLM's loader reads it."""
        return {
            "architectures": [self.architecture],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": target.vocab_size,
            "num_heads": self.heads,
            "num_hidden_layers": self.blocks,
            "max_paths": 64,
            "topk": 10,
            "original_lm_head": not self.own_heads,
            "medusa_fc_bias": True,
        }

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["MedusaConf", "MedusaDraft"]:
        """Load a checkpoint; raise UserError for another target, tokenizer or layout."""
        draft = MedusaDraft(MedusaConfig(**checkpoint.read_config(directory)), target)
        draft.restore(directory, target)
        own_heads = not draft.config.original_lm_head
        conf = cls(
            heads=draft.max_depth, blocks=draft.config.num_hidden_layers, own_heads=own_heads
        )
        return conf, draft


class ResidualBlock(nn.Module):
    """A stack of `num_layers` layers x + silu(linear(x)), which starts as the identity."""

    def __init__(self, size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDraft(FeatureDraft):
    """Residual blocks and vocabulary heads on the target's final hidden state."""

    method = "medusa"

    def __init__(self, config: Any, target: Target):
        super().__init__(config, target)
        self.needs = Needs(layers=[], hidden=True, context=False)
        self.trained_depth = self.max_depth = config.num_heads
        size, vocab = config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(
            ResidualBlock(size, config.num_hidden_layers) for _ in range(config.num_heads)
        )
        if config.original_lm_head:
            self.lm_head = nn.Linear(size, vocab, bias=False).requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, vocab, bias=False) for _ in range(config.num_heads)
            )

    @property
    def heads(self) -> list[nn.Linear]:
        """Return the vocabulary heads: a shared one, or one for each depth."""
        heads: Any = [self.lm_head] if self.config.original_lm_head else self.lm_heads
        return list(heads)

    def passes(self, depth: int) -> int:
        """Return at most 1: all heads read the same hidden state."""
        return min(depth, 1)

    def loss(self, batch: Batch, target_output: TargetOutput) -> Loss:
        """Compute the loss of all heads."""
        hidden = target_output.hidden.to(self.heads[0].weight.dtype)
        outputs = [block(hidden) for block in self.blocks]
        return self.distill(
            outputs, batch, target_output, heads=[head.weight for head in self.heads]
        )

    def new_state(self, batch: int, slots: int) -> DraftState:  # noqa: ARG002
        """Return room for one hidden state a row."""
        weight = self.heads[0].weight
        return {"hidden": weight.new_zeros(batch, self.config.hidden_size)}

    def start(
        self, state: DraftState, input_ids: Int[Tensor, "b prompt"], *,  # noqa: ARG002
        lengths: Int[Tensor, " b"], first_token: Int[Tensor, " b"], target_output: TargetOutput,  # noqa: ARG002
    ) -> DraftState:  # fmt: skip
        """Keep the hidden state of each prompt's last token."""
        return store_last_hidden(state, target_output, lengths)

    def advance(
        self, state: DraftState, input_ids: Int[Tensor, "b path"], *,  # noqa: ARG002
        count: Int[Tensor, " b"], target_output: TargetOutput,
    ) -> DraftState:  # fmt: skip
        """Keep the hidden state before the last emitted token of each row."""
        return store_last_hidden(state, target_output, count)

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Grow a tree; all nodes of a level have the logits of one head."""
        level = 0

        def logits() -> Float[Tensor, "b v"]:
            return self.heads[min(level, len(self.heads) - 1)](self.blocks[level](state["hidden"]))

        def expand(tokens: Tensor, parent_index: Tensor) -> Float[Tensor, "b 1 v"]:  # noqa: ARG001
            nonlocal level
            level += 1
            return logits()[:, None]  # one row of logits for all nodes

        return grow(tree, sampler, logits(), expand)


def store_last_hidden(
    state: DraftState, target_output: TargetOutput, count: Int[Tensor, " b"]
) -> DraftState:
    """Store the hidden state at the last of `count` positions; rows of count 0 keep theirs."""
    hidden = target_output.hidden.to(state["hidden"].dtype)
    last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    last_hidden = torch.where((count > 0)[:, None], hidden.gather(1, last)[:, 0], state["hidden"])
    return state | {"hidden": last_hidden}
