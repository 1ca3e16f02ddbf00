"""Medusa-1 (https://arxiv.org/abs/2401.10774): heads on the target's last hidden state.

    head i:  residual blocks over H_t, then a vocabulary head   ->   token t+2+i

The heads do not see one another: what they propose is a product of independent guesses, of which
the tree takes the likeliest paths. H_t is what the target's own head reads, after the final norm.
Blocks begin as the identity and heads as the target's own. Written as vLLM's loader reads it.

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
from models.drafts.base import Batch, Loss, Needs, State
from models.drafts.feature import FeatureConf, FeatureDraft
from models.errors import UserError
from models.parallel.dtensor import whole
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, grow
from models.target.language_model import Seen
from models.target.target import Target


class MedusaConfig(SimpleNamespace):
    """config.json of the published layout, a model type that transformers does not know."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(kw_only=True)
class MedusaConf(FeatureConf):
    """How many heads, and how deep each is."""

    method: ClassVar[str] = "medusa"
    architecture: ClassVar[str] = "MedusaModel"
    depth_key: ClassVar[str] = "heads"

    heads: int = 5  # tokens that it can propose
    blocks: int = 1  # residual blocks of each head
    own_heads: bool = True  # a vocabulary head for each; false: all read through the target's

    def __post_init__(self) -> None:
        for key in ("heads", "blocks"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    @property
    def reads_context(self) -> bool:
        return False

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "MedusaDraft":
        """A new draft: heads that repeat the target's own guess."""
        draft = MedusaDraft(MedusaConfig(**self.describe(target)), target)
        draft.loss_conf, draft.seed = loss, seed
        for head in draft.heads:
            head.load_state_dict({"weight": whole(target.head.weight)})
        return draft.to(target.head.weight.device)

    def describe(self, target: Target) -> dict[str, Any]:
        """The draft as vLLM's loader reads it."""
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
        draft = MedusaDraft(MedusaConfig(**checkpoint.read_config(directory)), target)
        draft.restore(directory, target)
        own = not draft.config.original_lm_head
        conf = cls(heads=draft.max_depth, blocks=draft.config.num_hidden_layers, own_heads=own)
        return conf, draft


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), `num` times, each with weights of its own; the identity at first."""

    def __init__(self, size: int, num: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDraft(FeatureDraft):
    """Blocks and vocabulary heads."""

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
        """Vocabulary heads: one for all, or one for each depth."""
        own: Any = [self.lm_head] if self.config.original_lm_head else self.lm_heads
        return list(own)

    def passes(self, depth: int) -> int:
        """All heads read the same."""
        return min(depth, 1)

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        hidden = seen.hidden.to(self.heads[0].weight.dtype)
        outputs = [block(hidden) for block in self.blocks]
        return self.distil(outputs, batch, seen, heads=[head.weight for head in self.heads])

    def new_state(self, batch: int, slots: int) -> State:  # noqa: ARG002
        weight = self.heads[0].weight
        return {"hidden": weight.new_zeros(batch, self.config.hidden_size)}

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *,  # noqa: ARG002
        lengths: Int[Tensor, " b"], first: Int[Tensor, " b"], seen: Seen,  # noqa: ARG002
    ) -> State:  # fmt: skip
        return last_hidden(state, seen, lengths)

    def advance(
        self, state: State, ids: Int[Tensor, "b path"], *,  # noqa: ARG002
        count: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        return last_hidden(state, seen, count)

    def propose(self, state: State, *, tree: Tree, sampler: Sampler) -> Proposal:
        level = 0

        def logits() -> Float[Tensor, "b v"]:
            return self.heads[min(level, len(self.heads) - 1)](self.blocks[level](state["hidden"]))

        def expand(tokens: Tensor, above: Tensor) -> Float[Tensor, "b 1 v"]:  # noqa: ARG001
            nonlocal level
            level += 1
            return logits()[:, None]  # the same behind every node

        return grow(tree, sampler, logits(), expand)


def last_hidden(state: State, seen: Seen, count: Int[Tensor, " b"]) -> State:
    """The target's hidden state at the last of `count` positions; rows without any keep theirs."""
    hidden = seen.hidden.to(state["hidden"].dtype)
    last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    kept = torch.where((count > 0)[:, None], hidden.gather(1, last)[:, 0], state["hidden"])
    return state | {"hidden": kept}
