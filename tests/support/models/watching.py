"""Watch the rounds of a decoder, and the operators that PyTorch runs."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WatchedOperators(TorchDispatchMode):
    """Call `watch` after each ATen operator with the operator, its arguments and its output."""

    def __init__(self, watch: Callable):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.watch(func, args, output)
        return output


class LargestTensor(WatchedOperators):
    """Record the largest number of elements that an operator has returned in a tensor, of any or of this width."""

    def __init__(self, width: int | None = None):
        super().__init__(self.measure)
        self.width, self.numel = width, 0

    def measure(self, func, args, output):
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and (self.width is None or leaf.shape[-1:] == (self.width,)):
                self.numel = max(self.numel, leaf.numel())


def watch_rounds(decoder, on_round):
    """Call `on_round` after each round with the verified tree, the emitted ids and their number."""
    run_round = decoder.session.run_round

    def watched(state, end_phase=None, *, longest):
        proposal = state.proposal
        state, output = run_round(state, end_phase, longest=longest)
        on_round(proposal, output.ids, output.count)
        return state, output

    decoder.session.run_round = watched
