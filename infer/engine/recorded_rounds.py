"""Rounds that are recorded once and replayed, so that the host launches a round and not each of its operations.

A recording reads and writes tensors of its own: a state that comes from elsewhere is copied into them, and the state
after a round is copied there as the round ends. Caches are changed in place, as always.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from infer.engine.steps import Program, RoundOutput, SessionState
from models.device.device import Device
from models.targets.cache import StaticCache

Round = Callable[[Program, SessionState], tuple[SessionState, RoundOutput]]


class RecordedRounds:
    """A round that runs the first time it gets its caches, is recorded the second time, and then replayed.

    The first call compiles and allocates, which a recording cannot hold. State and output of a call are valid
    until the next one.
    """

    def __init__(self, device: Device, run_round: Round):
        self.device, self.run_round = device, run_round
        self.recordings: dict[tuple[Any, ...], Recording | None] = {}

    def __call__(self, program: Program, state: SessionState) -> tuple[SessionState, RoundOutput]:
        key = (program, *(leaf for leaf in tree_leaves(state) if isinstance(leaf, StaticCache)))
        if key not in self.recordings:
            self.recordings[key] = None
            return self.run_round(program, state)
        recording = self.recordings[key]
        if recording is None:
            recording = self.recordings[key] = Recording(self.device, self.run_round, program, state)
        return recording.replay(state)


class Recording:
    """A round of a program on some caches, whose state is in fixed tensors."""

    def __init__(self, device: Device, run_round: Round, program: Program, state: SessionState):
        own = tree_map_only(Tensor, torch.clone, state)
        self.leaves, self.structure = tree_flatten(own)

        def run() -> RoundOutput:
            after, output = run_round(program, own)
            self.write(tree_leaves(after))
            return output

        self.launch = device.record(run)

    def replay(self, state: SessionState) -> tuple[SessionState, RoundOutput]:
        self.write(tree_leaves(state))
        output = self.launch()
        return tree_unflatten(self.leaves, self.structure), output

    def write(self, values: list[Any]) -> None:
        """Copy a state into the recording's own; a value may be one of its tensors, also another than its own."""
        changed = [(own, new) for own, new in zip(self.leaves, values, strict=True) if new is not own]
        owned = {_storage_of(own) for own in self.leaves if isinstance(own, Tensor)}
        for own, new in [(own, new.clone() if _storage_of(new) in owned else new) for own, new in changed]:
            own.copy_(new)


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()
