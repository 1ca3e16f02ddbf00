"""The interface of a drafting method: everything that the loops in train/ and infer/ rely on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.batch import Batch
from models.io.errors import require
from models.losses.config import LossConf
from models.losses.distributions import TopKLogits
from models.targets.language_model import LanguageModel, TargetOutput
from models.targets.target import Target
from models.trees.growth import Proposal
from models.trees.sampling import Sampler
from models.trees.tree import Tree

DraftState = dict[str, Any]  # tensors of fixed shapes; only the method interprets them
Extras = dict[str, Tensor]  # further arguments of `Draft.loss_terms` by name; tensors of fixed shapes


@dataclass(frozen=True, kw_only=True)
class ReadPrompts:
    """Padded prompts that the target has read, and the first new token of each."""

    ids: Int[Tensor, "batch prompt"]
    lengths: Int[Tensor, " batch"]
    first_token: Int[Tensor, " batch"]
    target_output: TargetOutput


@dataclass(frozen=True, kw_only=True)
class EmittedPath:
    """Tokens that the target has emitted, the first `count` of `ids`, and its outputs one position before each."""

    ids: Int[Tensor, "batch path"]
    count: Int[Tensor, " batch"]
    target_output: TargetOutput


@dataclass(kw_only=True)
class Loss:
    """Sums over a batch: the loop divides them by the weight of the step over all ranks."""

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, " 2"]]  # name -> (sum, count)


@dataclass(kw_only=True)
class HeadTerm:
    """A term of a loss before its heads are applied: arguments of `chunked_distillation_loss`, a scale, a prefix."""

    draft_hidden: Float[Tensor, "*steps tokens draft_width"]
    target_hidden_or_topk: Float[Tensor, "tokens target_width"] | TopKLogits
    draft_heads: list[Tensor]
    target_head: Any
    weight: Float[Tensor, "*steps tokens"]
    labels: Int[Tensor, " tokens"] | None
    kept_ids: Int[Tensor, " draft_vocab"] | None
    conf: LossConf
    scale: Tensor | float = 1.0  # of the term in the loss
    prefix: str = ""  # of its metrics' names


@dataclass(kw_only=True)
class LossTerms:
    """The terms of a loss, as sums over a batch; models/drafts/loss.py adds them up."""

    weight: Float[Tensor, ""]
    heads: list[HeadTerm] = field(default_factory=list)
    total: Float[Tensor, ""] | float = 0.0  # of the terms without a head
    metrics: dict[str, Float[Tensor, " 2"]] = field(default_factory=dict)  # of these


@dataclass(kw_only=True)
class Needs:
    """The target outputs that a method reads: a forward pass or a feature store provides them."""

    layers: list[int]  # captured layers: hidden_states[i], the tensor that enters layer i
    hidden: bool  # the draft reads the final hidden state; otherwise only the loss does
    context: bool  # outputs at all positions are needed; False: at supervised positions only
    storable: bool = True  # False: the outputs change during training


def require_no_bias(head: nn.Module, method: str) -> None:
    """Raise UserError for an LM head with a bias, which a loss that reads the head's weight alone leaves out."""
    require(
        getattr(head, "bias", None) is None,
        f"draft.method: {method} needs an LM head without a bias, got one with it; choose eagle3",
    )


class Draft(nn.Module):
    """A drafting method: its training (`loss_terms`) and its decoding (`start`, `propose`, `advance`)."""

    conf_class: ClassVar[Any]  # the class of its options
    conf: Any  # its options, of that class
    method: str
    needs: Needs
    max_depth: int  # depth of the deepest proposal it can make
    trained_depth: int  # depth that it was trained for
    loss_conf: LossConf = LossConf()  # set by `build`; a loaded checkpoint needs none
    reads_target_head: ClassVar[bool] = False  # whether the loss reads the weight of the target's head, whole
    recomputes: bool = False  # whether the loss's layers run again in its backward pass; set by training
    seed: int | None = None  # of the initial weights; None if a checkpoint does not record it

    @classmethod
    def build(cls, conf: Any, target: Target, *, loss: LossConf, seed: int) -> "Draft":
        """Build a new draft for this target, on the host; raise UserError if the two do not fit."""
        raise NotImplementedError

    @classmethod
    def matches_config(cls, config: dict[str, Any]) -> bool:
        """Return whether a checkpoint with this config.json belongs to this method."""
        return cls.conf_class.architecture in (config.get("architectures") or [])

    @classmethod
    def load(cls, directory: Path, target: Target) -> "Draft":
        """Load the draft of a checkpoint; raise UserError for another target or tokenizer, or a wrong layout."""
        raise NotImplementedError

    def start_from_first_stage(self, directory: Path, target: Target) -> None:
        """Take the weights of the draft that `DraftConf.first_stage` described and trained."""
        raise NotImplementedError

    def rebuild_untrained(self, target: Target) -> "Draft | str":
        """Return the draft before distillation, in the target's dtype, or why it cannot be rebuilt."""
        raise NotImplementedError

    def convert_weights(self, target: Target) -> Any:  # of the same class
        """Move the draft to the target's device, with weights in the target's dtype, as checkpoints have them.

        Buffers keep their dtype: the frequencies of rotary embeddings are fp32 in every engine.
        """
        for parameter in self.parameters():
            parameter.data = parameter.data.to(target.head.weight.dtype)
        return self.to(target.head.weight.device)

    def list_loss_heads(self) -> list[nn.Linear]:
        """Return the vocabulary heads that learn and whose weights only the loss reads in training."""
        return []

    def list_saved_weights(self) -> list[Tensor]:
        """Return the weights that a checkpoint holds, of which some may be the target's."""
        return [*self.parameters()]

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """Return the target ids of a reduced draft vocabulary, or None if it is the target's."""
        return None

    @property
    def graph_kind(self) -> str:
        """Return the kind of computation, sizes aside: drafts of one kind may share graphs."""
        return self.method

    def passes(self, depth: int) -> int:
        """Return the number of dependent forward passes in a proposal of this depth."""
        return depth

    @property
    def chosen_vocab_size(self) -> int | None:
        """Return the size of the vocabulary that training answers choose, or None if none is chosen."""
        return None

    def set_vocabulary(self, kept_ids: Int[Tensor, " draft_vocab"], target: Target) -> None:
        """Take these target ids, as many as are to be chosen, as the vocabulary; call it before training."""
        raise NotImplementedError

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        """Return further arguments of `loss_terms`: random numbers and values that change with the step.

        Each row has its own generator, so that it gets the same numbers in any micro-batch and process. A thread that
        runs ahead of the step calls it on the host: it must not read weights or the mode of the module.
        """
        return {}

    def term_weights(self, batch: Batch) -> Float[Tensor, " terms"] | None:
        """Return the weights of loss terms that count different positions, from the masks only; else None.

        `loss_terms` receives their sums over all rows of the optimizer step as `term_weight_sums`.
        """
        return None

    def loss_terms(self, batch: Batch, target_output: TargetOutput) -> LossTerms:
        """Return the terms of the training loss of one batch, given the target's output on it."""
        raise NotImplementedError

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return an empty state for `batch` rows of at most `slots` tokens, tree nodes included."""
        raise NotImplementedError

    def start(self, state: DraftState, prompts: ReadPrompts) -> DraftState:
        """Return the new `state` after the prompts and their first new tokens.

        By default the draft advances by all tokens but the first of each prompt, as if they had been emitted.
        """
        ids, lengths = prompts.ids, prompts.lengths
        is_last = torch.arange(ids.shape[1], device=ids.device) == (lengths - 1)[:, None]
        # Nothing reads the tokens after the last: `count` ends there.
        emitted = torch.where(is_last, prompts.first_token[:, None], ids.roll(-1, 1))
        return self.advance(state, EmittedPath(ids=emitted, count=lengths, target_output=prompts.target_output))

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Return a token tree below the last known token; leave the state unchanged.

        A cache's slots past the known tokens are scratch, not a part of the state: a proposal
        overwrites them, because shapes and addresses of the cache are fixed.
        """
        raise NotImplementedError

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        """Return the state after the target emitted these tokens."""
        raise NotImplementedError

    def save(self, directory: Path, target: Target, *, writes: bool = True) -> None:
        """Write a checkpoint in the layout that serving engines load.

        Collective: every process that holds a part of the target calls it, and one of them `writes`.
        """
        raise NotImplementedError

    def get_adapted_target(self, target: Target) -> Target | None:
        """Return the target that this draft's method has adapted, or None if it adapts none."""
        return None

    def get_verifying_target(self, target: Target) -> Target:
        """Return the target that verifies this draft: the adapted one if there is one."""
        return self.get_adapted_target(target) or target

    def as_language_model(self) -> LanguageModel | None:
        """Return the draft as a language model that can generate text, or None if it is not one."""
        return None


def with_last_hidden(
    state: DraftState, hidden: Float[Tensor, "batch path width"], count: Int[Tensor, " batch"]
) -> DraftState:
    """Return the state with the hidden state at the last of each row's first `count` positions.

    Rows whose count is 0 keep the one that they have.
    """
    last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return state | {"hidden": torch.where((count > 0)[:, None], hidden.gather(1, last)[:, 0], state["hidden"])}
