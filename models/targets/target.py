"""The frozen target: the model whose outputs must not change."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

from models.device.device import Device
from models.io.errors import require
from models.targets.language_model import LanguageModel, TargetOutput

# Where a function with a `target` reaches its frozen weights: the guards of dynamo that Device.compile may leave out,
# as they check the target's fingerprint.
WEIGHT_NAMES = ("target._run_layers.decoder.", "target.head.")


class Target(LanguageModel):
    """A frozen causal LM. `tokenizer` is None only in tests that use nothing but token ids."""

    processes = 1  # that hold its weights together
    gathers_weights = False  # of a layer, for each pass
    tables_fingerprint = ""  # of embeddings and head, as of all weights
    tokenizer_fingerprint = ""
    tokenizer_folder: Path | None = None  # of the tokenizer's own files; None: made in memory
    revision: str | None = None  # of its hub repository; None: the newest

    def __init__(self, model: Any, tokenizer: Any, *, name: str, device: Device, hash_model: Callable[[Any], str]):
        super().__init__(model.eval().requires_grad_(False), device=device)
        self.tokenizer, self.name = tokenizer, name
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.hash_model, self.fingerprint = hash_model, hash_model(model)

    @property
    def graph_key(self) -> str:
        """Return the key with the fingerprint, so that each target has graphs of its own."""
        return f"{super().graph_key} {self.fingerprint[:8]}"

    def cpu_threads(self) -> AbstractContextManager[None]:
        """Return a context with as many threads as decoding keeps busy, on a CPU."""
        return self.device.cpu_threads_for(self.num_parameters // self.num_layers)

    def with_weights(self, lm: LanguageModel, *, name: str) -> "Target":
        """Return a target of the same architecture and tokenizer with the weights of `lm`."""
        target = copy.copy(self)
        target.model, target.decoder, target.head = lm.model, lm.decoder, lm.head
        target._run_layers = lm._run_layers
        target.name, target.fingerprint = name, self.hash_model(lm.model)
        return target

    def forward_hidden(self, *args: Any, **kwargs: Any) -> TargetOutput:
        assert self.fingerprint  # reading it makes dynamo guard on the target's identity
        return super().forward_hidden(*args, **kwargs)

    def check_layers(self, layers: list[int], *, default: list[int]) -> None:
        """Raise UserError unless `layers` are inputs of existing layers, in increasing order."""
        valid = f"null takes {default}"
        require(
            all(a < b for a, b in pairwise(layers)), f"draft.layers: must be strictly increasing, got {layers}; {valid}"
        )
        require(
            bool(layers) and layers[0] >= 0 and layers[-1] < self.num_layers,
            f"draft.layers: must lie in 0..{self.num_layers - 1} for target {self.name}, got {layers}; {valid}",
        )
