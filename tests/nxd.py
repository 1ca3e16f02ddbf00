"""A stand-in for neuronx-distributed: its published signatures over our reference layers.

Only what we call is listed, as of NxD 0.18 (SDK 2.29) and torch_xla 2.9. A keyword that the real
package does not take fails here.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from models import parallel_layers

LAYERS, STATE = (
    f"neuronx_distributed.parallel_layers.{name}" for name in ("layers", "parallel_state")
)
SIGNATURES = {
    f"{LAYERS}.ColumnParallelLinear": """(
        input_size, output_size, bias=True, gather_output=True, dtype=None, device=None, stride=1,
        init_method=None, sequence_parallel_enabled=False, sequence_dimension=None,
        keep_master_weight=False, skip_bias_add=False, pad=False, pad_alignment_size_per_rank=1,
        keep_padded_output=False, tensor_model_parallel_group=None, reduce_dtype=None,
        rank_ordering=None)""",
    f"{LAYERS}.RowParallelLinear": """(
        input_size, output_size, bias=True, input_is_parallel=False, dtype=None, device=None,
        stride=1, init_method=None, sequence_parallel_enabled=False, sequence_dimension=None,
        keep_master_weight=False, skip_bias_add=False, pad=False, reduce_output=True,
        tensor_model_parallel_group=None, reduce_dtype=None, tile_cc=False, rank_ordering=None)""",
    f"{LAYERS}.ParallelEmbedding": """(
        num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0,
        scale_grad_by_freq=False, sparse=False, init_method=None, device=None, dtype=None,
        shard_across_embedding=False, pad=False, sequence_parallel_enabled=False,
        tensor_model_parallel_group=None, use_spmd_rank=False, sequence_dimension=None,
        tile_cc=False, rank_ordering=None, collect_output=True)""",
    f"{STATE}.initialize_model_parallel": """(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
        expert_model_parallel_size=1, skip_collective_init=False, lnc_size=1, mesh_only=False)""",
    f"{STATE}.model_parallel_is_initialized": "()",
    f"{STATE}.get_tensor_model_parallel_rank": "()",
    f"{STATE}.get_data_parallel_rank": "()",
}


class Engine:
    """What the package does behind its signatures."""

    group: dist.ProcessGroup | None = None

    def __init__(self, ready: dist.ProcessGroup | None):
        self.ready = ready  # the group that this process will be in

    def _layer(self, name: str, given: dict[str, Any]) -> Any:
        ours = {"tensor_model_parallel_group": self.group}
        return getattr(parallel_layers, name)(**given | ours)

    def initialize_model_parallel(self, tensor_model_parallel_size: int) -> None:
        assert dist.get_world_size(self.ready) == tensor_model_parallel_size
        self.group = self.ready

    def model_parallel_is_initialized(self) -> bool:
        return self.group is not None

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // dist.get_world_size(self.group)

    def called(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        """One function or class of the package. Raises TypeError for what it does not take."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            own = getattr(self, name, None)
            return own(**given) if own else self._layer(name, given)

        return call


def install(ready: dist.ProcessGroup | None = None, modules: dict[str, Any] = sys.modules) -> None:
    """Make the stand-in importable, by this process alone."""
    engine = Engine(ready)
    for path, text in SIGNATURES.items():
        made: dict[str, Any] = {}
        exec(f"def listed{text}: ...", made)
        *above, name = path.split(".")
        for depth in range(1, len(above) + 1):
            module = modules.setdefault(".".join(above[:depth]), ModuleType(above[depth - 1]))
            if depth > 1:
                setattr(modules[".".join(above[: depth - 1])], above[depth - 1], module)
        setattr(module, name, engine.called(name, inspect.signature(made["listed"])))
