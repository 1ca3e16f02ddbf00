"""What a drafting method must provide: all that the loops in train/ and infer/ know of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.distill.losses import LossConf
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree
from models.target.language_model import Seen, Transformer
from models.target.target import Target

State = dict[str, Any]  # tensors of one method, opaque to the loops; fixed shapes
Extras = dict[str, Tensor]  # further arguments of `Draft.loss`, by their names; fixed shapes


@dataclass(kw_only=True)
class Batch:
    """Packed training rows: several documents a row, or pieces of documents."""

    ids: Int[Tensor, "rows length"]
    answer: Bool[Tensor, "rows length"]  # ids[t] is a token of an answer
    document: Int[Tensor, "rows length"]  # number of the document within its row, -1 = padding
    positions: Int[Tensor, "rows length"]  # restart at 0 in each document
    context: Bool[Tensor, "rows length"] | None = None  # a piece's beginning, learned elsewhere

    def to(self, device: torch.device) -> "Batch":
        there = {name: x.to(device) for name, x in vars(self).items() if x is not None}
        return Batch(**there)

    def attends(self) -> Bool[Tensor, "rows 1 length length"]:
        """Causal within a document. Padding sees itself, so that no softmax row is empty."""
        same = self.document[:, :, None] == self.document[:, None, :]
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return (same & causal)[:, None]


@dataclass(kw_only=True)
class Loss:
    """Sums, not means: the loop divides by the weight of the whole step, over all ranks."""

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, " 2"]]  # name -> (sum, count)


@dataclass(kw_only=True)
class Needs:
    """What a method takes from the target: all that a pass must give, or a store must hold.

    Every method is taught besides: by the target's distribution at the supervised rows.
    """

    layers: list[int]  # captured layers: hidden_states[i], the tensor that enters layer i
    hidden: bool  # the final hidden state is an input; else it does no more than teach
    context: bool  # inputs of all rows are read; False: of supervised rows alone
    storable: bool = True  # False: what it needs changes while it learns


class Draft(nn.Module):
    """One method: how it learns (`loss`), how it drafts (`start`, `propose`, `advance`)."""

    method: ClassVar[str]
    needs: Needs
    max_depth: int  # deepest proposal it can make
    trained_depth: int  # deepest it was trained for

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """Target ids of a reduced draft vocabulary; None where it is the target's own."""
        return None

    @property
    def kind(self) -> str:
        """What it computes, as far as that is no number: drafts of a kind may share graphs."""
        return self.method

    def passes(self, depth: int) -> int:
        """Forward passes that wait for each other in a proposal of this depth."""
        return depth

    def prepare(
        self,
        counts: Int[Tensor, " vocab"],  # noqa: ARG002
        *,
        target: Target,  # noqa: ARG002
        always: list[int],  # noqa: ARG002
    ) -> dict[str, float]:
        """Last choices before training, from the token counts of the training answers.

        `always` are token ids that a reduced vocabulary keeps. Returns figures worth printing.
        """
        return {}

    def prepare_batch(
        self,
        batch: Batch,  # noqa: ARG002
        *,
        step: int,  # noqa: ARG002
        generators: list[np.random.Generator],  # noqa: ARG002
    ) -> Extras:
        """Return what `loss` takes besides: what is random, and what changes with the step.

        There is a generator for each row, keyed by (seed, step, row), so that a row meets the same
        numbers in whatever micro-batch and process it is read. They are drawn on the host, as not
        every accelerator draws in a graph, by a thread that runs ahead of the step: neither weights
        nor the mode of the module may be read here.
        """
        return {}

    def term_weights(self, batch: Batch) -> Float[Tensor, " terms"] | None:  # noqa: ARG002
        """Weigh the terms of a loss whose terms count rows differently, by the masks alone.

        `loss` is then given `step_weights`, their sums over all rows of the optimizer step, and
        scales its terms by them. None: `Loss.weight` is the weight of the whole loss.
        """
        return None

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        """Compute the training loss of one batch, given what the target computed on it.

        What `prepare_batch` returns, and `step_weights`, are passed as further named arguments.
        """
        raise NotImplementedError

    def new_state(self, batch: int, slots: int) -> State:
        """Empty state for `batch` rows of at most `slots` tokens, tree nodes included."""
        raise NotImplementedError

    def start(
        self, state: State, ids: Int[Tensor, "batch prompt"], *,
        lengths: Int[Tensor, " batch"], first: Int[Tensor, " batch"], seen: Seen,
    ) -> State:  # fmt: skip
        """After the prompt (`lengths` tokens of each row) and its first new token."""
        raise NotImplementedError

    def propose(self, state: State, *, tree: Tree, sampler: Sampler) -> Proposal:
        """A token tree that hangs on the last known token. The state is unchanged."""
        raise NotImplementedError

    def advance(
        self, state: State, ids: Int[Tensor, "batch path"], *,
        count: Int[Tensor, " batch"], seen: Seen,
    ) -> State:  # fmt: skip
        """After the target emitted `count` of `ids`; `seen` holds the positions before them."""
        raise NotImplementedError

    def save(self, directory: Path, target: Target) -> None:
        """Write the checkpoint that serving engines load."""
        raise NotImplementedError

    def verifier(self, target: Target) -> Target | None:  # noqa: ARG002
        """The target that checks this draft, where a method adapts its own; None: `target`."""
        return None

    def speaker(self) -> Transformer | None:
        """The draft as a language model that can write texts itself; None where it is none."""
        return None


@dataclass(kw_only=True)
class DraftConf:
    """Configures one method and builds it. A subclass names its method in `method`."""

    method: ClassVar[str]
    architecture: ClassVar[str]  # in config.json, and how a checkpoint is recognised
    depth_key: ClassVar[str] = "max_depth"  # the field that limits how deep it can propose
    adapts: ClassVar[bool] = False  # whether it learns weights of the target's too
    speaks: ClassVar[bool] = False  # whether `Draft.speaker` gives a language model

    @property
    def deepest(self) -> int:
        """Tokens of the deepest proposal."""
        return getattr(self, self.depth_key)

    @property
    def reads_context(self) -> bool:
        """`Needs.context` of what it builds: such a method cannot learn from a split document."""
        return True

    def check(self) -> None:
        """Refuse what can be known to be wrong before a model is loaded, by a UserError."""

    def build(self, target: Target, *, loss: LossConf, seed: int) -> Draft:
        """A new draft for this target. Raises UserError where the two do not fit."""
        raise NotImplementedError

    @classmethod
    def reads(cls, config: dict[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is one of this method."""
        return cls.architecture in config.get("architectures", [])

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["DraftConf", Draft]:
        """Read a checkpoint back. Raises UserError for another target, tokenizer or layout."""
        raise NotImplementedError

    def untrained(self, draft: Draft, target: Target) -> Draft | str:
        """The draft as it was before distillation, or why it cannot be rebuilt."""
        raise NotImplementedError
