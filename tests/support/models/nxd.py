"""Stand in for the engines of the XLA route: their published signatures over gloo.

Only the functions that we call are listed, as of neuronx-distributed 0.18 (SDK 2.29) and torch_xla 2.9. A keyword
that the real package does not take fails here.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.models import parallel_layers

LAYERS, STATE = (f"neuronx_distributed.parallel_layers.{name}" for name in ("layers", "parallel_state"))
ZERO = "torch_xla.distributed.zero_redundancy_optimizer"
REDUCE_SUM = "sum"
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
    f"{ZERO}.ZeroRedundancyOptimizer": """(
        params, optimizer_class, optimizer_dtype=None, grad_clipping=True, max_norm=None,
        pin_layout=True, sharding_groups=None, grad_norm_groups=None, lazy_init=False,
        bucket_cap_mb_all_gather=0, bucket_cap_mb_reduce_scatter=0, use_grad_acc_hook=False,
        save_master_weights=False, higher_cc_precision=False, **defaults)""",
    "torch_xla.sync": "(wait=False, reset_scope=True)",
    "torch_xla.core.xla_model.all_reduce": """(
        reduce_type, inputs, scale=1.0, groups=None, cctx=None, pin_layout=True)""",
    "torch_xla.core.xla_model.all_gather": """(
        value, dim=0, groups=None, output=None, pin_layout=True, channel_id=None,
        use_global_device_ids=None)""",
}


class Zero:
    """Optimizer steps of ZeRO-1: average gradients, update this rank's rows, gather all rows."""

    def __init__(self, group: dist.ProcessGroup, params: Any, optimizer_class: Any, **defaults: Any):
        self.group, self.param_groups = group, params
        shares = [
            entry | {"params": [nn.Parameter(self._slice_rows(p.detach())) for p in entry["params"]]}
            for entry in params
        ]
        self.base_optimizer = optimizer_class(shares, **defaults)

    def _slice_rows(self, full: Tensor) -> Tensor:
        at, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        rows = -(-len(full) // ranks)
        padded = torch.zeros(rows, *full.shape[1:])
        part = full[at * rows :][:rows]
        padded[: len(part)] = part
        return padded

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        both = list(zip(self.param_groups, self.base_optimizer.param_groups, strict=True))
        for ours, base in both:
            base.update({name: value for name, value in ours.items() if name != "params"})
            for full, part in zip(ours["params"], base["params"], strict=True):
                dist.all_reduce(full.grad, group=self.group)
                part.grad = self._slice_rows((full.grad / dist.get_world_size(self.group)).float())
        self.base_optimizer.step()
        for ours, base in both:
            for full, part in zip(ours["params"], base["params"], strict=True):
                full.copy_(all_gather(part.detach(), self.group)[: len(full)])


def all_gather(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value, group=group)
    return torch.cat(parts)


class Engine:
    """The computations behind the signatures."""

    group: dist.ProcessGroup | None = None

    def __init__(self, ready: dist.ProcessGroup | None, data_rank: int):
        self.ready, self.data_rank = ready, data_rank  # the group that this process will be in, and its number

    def _layer(self, name: str, options: dict[str, Any]) -> Any:
        ours = {"tensor_model_parallel_group": self.group}
        return getattr(parallel_layers, name)(**options | ours)

    def initialize_model_parallel(self, tensor_model_parallel_size: int) -> None:
        assert dist.is_initialized()  # as the real one asserts
        assert dist.get_world_size(self.ready) == tensor_model_parallel_size
        self.group = self.ready

    def model_parallel_is_initialized(self) -> bool:
        return self.group is not None

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def ZeroRedundancyOptimizer(self, **options: Any) -> Zero:  # noqa: N802
        assert not options.pop("grad_clipping")  # our loop clips, before
        assert options.pop("save_master_weights")  # else it warns
        assert options.pop("higher_cc_precision")  # sums gradients in fp32
        assert not options.pop("pin_layout")  # as Neuron asks
        return Zero(self.ready, **options)

    def sync(self, wait: bool = False) -> None:
        """Do nothing, because no operations are recorded here."""

    def all_reduce(self, reduce_type: str, inputs: Tensor) -> Tensor:
        assert reduce_type == REDUCE_SUM
        assert inputs.dtype is torch.float32
        total = inputs.clone()
        dist.all_reduce(total, group=self.ready)
        return total

    def all_gather(self, value: Tensor, **_: Any) -> Tensor:
        return all_gather(value, self.ready)

    def build_call(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        """Return a function or class of the package. A call raises TypeError for arguments that the package rejects."""

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            arguments |= arguments.pop("defaults", {})
            own = getattr(self, name, None)
            return own(**arguments) if own else self._layer(name, arguments)

        return call


def install(
    ready: dist.ProcessGroup | None = None, *, data_rank: int = 0, modules: dict[str, Any] = sys.modules
) -> None:
    """Make the stand-in importable, by this process alone."""
    engine = Engine(ready, data_rank)
    for path, text in SIGNATURES.items():
        namespace: dict[str, Any] = {}
        exec(f"def listed{text}: ...", namespace)
        *above, name = path.split(".")
        for depth in range(1, len(above) + 1):
            module = modules.setdefault(".".join(above[:depth]), ModuleType(above[depth - 1]))
            if depth > 1:
                setattr(modules[".".join(above[: depth - 1])], above[depth - 1], module)
        setattr(module, name, engine.build_call(name, inspect.signature(namespace["listed"])))
    modules["torch_xla.core.xla_model"].REDUCE_SUM = REDUCE_SUM
