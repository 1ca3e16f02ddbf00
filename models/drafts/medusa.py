"""Medusa-1 (https://arxiv.org/abs/2401.10774): heads on the target's last hidden state.

    head i:  residual blocks over H_t, then a vocabulary head   ->   token t+2+i

H_t is the input of the target's own head, after the final norm; see docs/heads.md.

Axes: B rows, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from models.batch import Batch
from models.drafts.base import DraftState, EmittedPath, LossTerms, with_last_hidden
from models.drafts.bases.feature import HeadsDraft
from models.drafts.options import MedusaConf
from models.targets.language_model import TargetOutput
from models.targets.target import Target
from models.trees.growth import Proposal, grow
from models.trees.sampling import Sampler
from models.trees.tree import Tree


class MedusaConfig(SimpleNamespace):
    """The content of config.json; transformers has no class for this model type."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of config.json."""
        return dict(vars(self))


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


class MedusaDraft(HeadsDraft):
    """Residual blocks and vocabulary heads on the target's final hidden state."""

    conf_class = MedusaConf
    config_class: ClassVar[Callable[..., Any]] = MedusaConfig
    config_keys: ClassVar[dict[str, str]] = {"heads": "num_heads", "num_layers": "num_hidden_layers"}

    def __init__(self, conf: Any, config: MedusaConfig, target: Target):
        super().__init__(conf, config, target)
        size, vocab = config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(ResidualBlock(size, config.num_hidden_layers) for _ in range(config.num_heads))
        if config.original_lm_head:
            self.lm_head = nn.Linear(size, vocab, bias=False).requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(config.num_heads))

    @classmethod
    def engine_config(cls, conf: Any, target: Target, **overrides: Any) -> MedusaConfig:
        """Build the content of config.json as vLLM's loader reads it."""
        return MedusaConfig(
            architectures=[conf.architecture],
            model_type="medusa",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            truncated_vocab_size=target.vocab_size,
            num_heads=conf.heads,
            num_hidden_layers=conf.num_layers,
            max_paths=64,
            topk=10,
            original_lm_head=not conf.separate_lm_heads,
            medusa_fc_bias=True,
            **overrides,
        )

    @classmethod
    def default_keys(cls, target: Target) -> dict[str, Any]:
        """Return the keys that vLLM's converted drafts lack, with the values that vLLM takes, or the target's."""
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        lacking = {"num_hidden_layers": 1, "original_lm_head": False, "medusa_fc_bias": False}
        return super().default_keys(target) | sizes | lacking

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by vLLM's names; biases of blocks that have none stay 0."""
        tensors = super().checkpoint_tensors()
        return {n: t for n, t in tensors.items() if self.config.medusa_fc_bias or not n.endswith(".bias")}

    @property
    def heads(self) -> list[nn.Linear]:
        heads: Any = [self.lm_head] if self.config.original_lm_head else self.lm_heads
        return list(heads)

    def loss_terms(self, batch: Batch, target_output: TargetOutput) -> LossTerms:
        hidden = target_output.hidden.to(self.dtype)
        outputs = [block(hidden) for block in self.blocks]
        return self.distill(outputs, batch, target_output, heads=[head.weight for head in self.heads])

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        """Return the state with the hidden state before the last emitted token of each row."""
        return with_last_hidden(state, emitted.target_output.hidden.to(self.dtype), emitted.count)

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Grow a tree and return it; all nodes of a level have the same logits, of one head."""

        def logits(level: int) -> Float[Tensor, "b v"]:
            return self.head_of(level)(self.blocks[level](state["hidden"]))

        def expand(_tokens: Tensor, _parent_index: Tensor, level: int) -> Float[Tensor, "b 1 v"]:
            return logits(level)[:, None]  # the same logits for all nodes

        return grow(tree, sampler, logits(0), expand)
