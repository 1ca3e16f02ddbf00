"""The frozen target: the model whose outputs must not change."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from models.checkpoints.checkpoint import find_non_finite, target_fingerprint, tokenizer_fingerprint
from models.checkpoints.tokenizer_files import copy_tokenizer_files
from models.device.device import Device
from models.io.errors import UserError, require
from models.targets.language_model import LanguageModel, TargetOutput


class Target(LanguageModel):
    """A frozen causal LM. `tokenizer` is None only in tests that use nothing but token ids."""

    tokenizer_folder: Path | None = None  # of the tokenizer's own files; None: made in memory

    def __init__(self, model: Any, tokenizer: Any, *, name: str, device: Device):
        super().__init__(model.eval().requires_grad_(False), device=device)
        self.tokenizer, self.name = tokenizer, name
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.fingerprint = self.hash_weights()
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer else ""
        self.check_logits()

    @property
    def graph_key(self) -> str:
        """Return the key with the fingerprint, so that each target has graphs of its own."""
        return f"{super().graph_key} {self.fingerprint[:8]}"

    def with_weights(self, lm: LanguageModel, *, name: str) -> "Target":
        """Return a target of the same architecture and tokenizer with the weights of `lm`."""
        target = copy.copy(self)
        target.model, target.decoder, target.head = lm.model, lm.decoder, lm.head
        target._run_layers = lm._run_layers
        target.name, target.fingerprint = name, target.hash_weights()
        return target

    def hash_weights(self) -> str:
        """Return the fingerprint of the model."""
        return target_fingerprint(self.model)

    def forward_hidden(self, *args: Any, **kwargs: Any) -> TargetOutput:
        """Run one forward pass; see `LanguageModel.forward_hidden`."""
        assert self.fingerprint  # reading it makes dynamo guard on the target's identity
        return super().forward_hidden(*args, **kwargs)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer: its own files where there are any."""
        if self.tokenizer_folder is not None:
            copy_tokenizer_files(self.tokenizer_folder, folder)
        elif self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

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

    @torch.no_grad()
    def check_logits(self) -> None:
        """Reject models whose logits are not finite, or scaled or capped after the LM head.

        `logits` does not scale or cap.
        """
        # Two tokens are enough to compare, and every vocabulary has the ids 0 and 1.
        input_ids = torch.arange(2, device=self.head.weight.device)[None]
        expected = self.model(input_ids=input_ids).logits
        if not expected.isfinite().all():
            weight = find_non_finite(self.model)
            raise UserError(
                f"target.name: the model's logits must be finite, got {self.name!r}, "
                + (
                    f"whose weight {weight} is not; give intact weights"
                    if weight
                    else f"which overflows in {expected.dtype}; set device.precision=float32"
                )
            )
        logits = self.logits(self.decoder(input_ids=input_ids).last_hidden_state)
        require(
            # Both passes compute the same in the same precision; bfloat16 rounds by 0.4 % at most.
            torch.allclose(expected.float(), logits.float(), atol=1e-3, rtol=1e-2),
            "target.name: the model must not scale or cap its logits after the LM head, got "
            f"{self.name!r} ({type(self.model).__name__}); choose another target",
        )
