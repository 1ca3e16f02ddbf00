"""The frozen target: the model whose outputs must not change."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import target_fingerprint, tokenizer_fingerprint
from models.device import Device
from models.errors import UserError
from models.target.language_model import Seen, Source, Transformer

DEMO = Path(__file__).parents[2] / "data" / "demo" / "target"


@dataclass(kw_only=True)
class TargetConf:
    """Which model must not change: a hub name, a local path, or `demo`."""

    name: str = "demo"
    path: str | None = None  # of a local copy of it
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def is_demo(self) -> bool:
        """Whether it is the target that ships in data/demo."""
        return Path(self.source.place).resolve() == DEMO.resolve()

    @property
    def source(self) -> Source:
        return Source(
            key="target",
            name=self.name,
            path=str(DEMO) if self.name == "demo" and self.path is None else self.path,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )

    def build(self, device: Device, *, read: Callable[[Source], Any] | None = None) -> "Target":
        """Load and freeze. Raises UserError for what cannot be had or served exactly.

        `read` loads a model that does not lie on this device alone.
        """
        source = self.source
        source.config()
        model = read(source) if read else source.model(device.dtype)
        target = Target(model, source.tokenizer(), name=self.path or self.name, device=device)
        if not read:  # after the checks: they would be graphs where operations are recorded
            model.to(device.torch_device)
        return target


class Target(Transformer):
    """A frozen causal LM. `tokenizer` is None only in tests that deal in ids."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str, device: Device):
        super().__init__(model.eval().requires_grad_(False), device=device)
        self.tokenizer, self.name = tokenizer, name
        self.parameters = sum(p.numel() for p in model.parameters())
        self.fingerprint = target_fingerprint(model)
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer else ""
        self._check_head()

    @property
    def graph_key(self) -> str:
        """Graphs read the fingerprint, so that two targets of one architecture have their own."""
        return f"{super().graph_key} {self.fingerprint[:8]}"

    def eager(self) -> "Target":
        """The same target for few rounds, which compiling would only delay."""
        eager = copy.copy(self)
        eager.device = self.device.eager()
        return eager

    def with_weights(self, lm: Transformer, *, name: str) -> "Target":
        """A target of the same architecture and tokenizer that computes as `lm` does."""
        other = copy.copy(self)
        for key, value in vars(lm).items():
            setattr(other, key, value)
        other.device, other.name = self.device, name
        other.fingerprint = target_fingerprint(lm.model)
        return other

    def see(self, *args: Any, **kwargs: Any) -> Seen:
        """One forward pass of `Transformer.see`."""
        assert self.fingerprint  # read, so that a compiled graph knows whose it is
        return super().see(*args, **kwargs)

    def check_layers(self, layers: list[int], *, default: list[int]) -> None:
        """Raise UserError unless each is the input of a layer, in increasing order."""
        valid = f"null takes {default}"
        if any(b <= a for a, b in pairwise(layers)):
            raise UserError(f"draft.layers: must be strictly increasing, got {layers}; {valid}")
        if not layers or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise UserError(
                f"draft.layers: must lie in 0..{self.num_layers - 1} for target {self.name}, "
                f"got {layers}; {valid}"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some families scale or cap their logits after the head; those are not served exactly."""
        ids = torch.arange(2, device=self.head.weight.device)[None]
        whole = self.model(input_ids=ids).logits
        ours = self.logits(self.decoder(input_ids=ids).last_hidden_state)
        if not torch.allclose(whole.float(), ours.float(), atol=1e-3, rtol=1e-2):
            raise UserError(
                f"target.name: {type(self.model).__name__} changes its logits after the head and "
                f"cannot be served exactly, got {self.name!r}; choose another target"
            )
