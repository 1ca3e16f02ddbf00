"""Column- and row-parallel layers in plain torch.distributed, the reference for the engine's own layers.

They have the signatures, weights and results of NxD's layers of the same names, as
far as a frozen target uses them; a cut target is tested with them.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_rank, get_world_size

from models.parallel.tensor_parallel import LayerShard, ParallelLayers


def build_reference_layers(group: ProcessGroup) -> ParallelLayers:
    """Return the layers for models that the processes of `group` share."""
    ours = {"tensor_model_parallel_group": group}
    return ParallelLayers(
        ranks=get_world_size(group),
        rank=get_rank(group),
        column=partial(ColumnParallelLinear, **ours),
        row=partial(RowParallelLinear, **ours),
        embedding=partial(ParallelEmbedding, **ours),
    )


class _Parallel(nn.Module):
    """A layer that holds its rank's share of the weight."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        bias: int | None,
        *,
        group: ProcessGroup,
        dtype: torch.dtype,
        device: torch.device | None,
    ):
        super().__init__()
        self.group, self.ranks, self.rank = group, get_world_size(group), get_rank(group)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        added = None if bias is None else torch.empty(bias, dtype=dtype, device=device)
        self.bias = None if added is None else nn.Parameter(added)

    def gather(self, part: Float[Tensor, "*rows part"]) -> Float[Tensor, "*rows features"]:
        """Concatenate the parts of all ranks."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def summed(self, part: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows features"]:
        dist.all_reduce(part, group=self.group)
        return part


class ColumnParallelLinear(_Parallel):
    """A linear layer in which each rank computes some of the output features."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        tensor_model_parallel_group: ProcessGroup,
    ):
        part = output_size // get_world_size(tensor_model_parallel_group)
        added = output_size if gather_output else part  # gathered features need the full bias
        super().__init__(
            (part, input_size), added if bias else None, group=tensor_model_parallel_group, dtype=dtype, device=device
        )
        self.gather_output = gather_output

    def forward(self, features: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        result = F.linear(features, self.weight)
        if self.gather_output:
            result = self.gather(result)
        return result if self.bias is None else result + self.bias


class RowParallelLinear(_Parallel):
    """A linear layer in which each rank reads some of the input features; the output is the sum over ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        tensor_model_parallel_group: ProcessGroup,
    ):
        part = input_size // get_world_size(tensor_model_parallel_group)
        super().__init__(
            (output_size, part),
            output_size if bias else None,
            group=tensor_model_parallel_group,
            dtype=dtype,
            device=device,
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, features: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        if not self.input_is_parallel:
            features = features.chunk(self.ranks, -1)[self.rank]
        # partial sums are added in fp32, as NxD does
        result = self.summed(F.linear(features, self.weight).float()).to(features.dtype)
        return result if self.bias is None else result + self.bias


class ParallelEmbedding(_Parallel):
    """An embedding in which each rank holds some rows or some columns of the table."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        shard_across_embedding: bool = False,
        *,
        tensor_model_parallel_group: ProcessGroup,
    ):
        ranks = get_world_size(tensor_model_parallel_group)
        rows, columns = num_embeddings, embedding_dim // ranks
        if not shard_across_embedding:
            rows, columns = num_embeddings // ranks, embedding_dim
        super().__init__((rows, columns), None, group=tensor_model_parallel_group, dtype=dtype, device=device)
        self.shard_across_embedding = shard_across_embedding

    def forward(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows features"]:
        if self.shard_across_embedding:
            return self.gather(F.embedding(ids, self.weight))
        rows = len(self.weight)
        here = ids - self.rank * rows
        mine = (here >= 0) & (here < rows)
        embedded = F.embedding(here.clamp(0, rows - 1), self.weight)
        return self.summed(embedded * mine[..., None])


def shard_state_dict(
    full: Mapping[str, Shaped[Tensor, "..."]], shards: Mapping[str, LayerShard], *, ranks: int, rank: int
) -> dict[str, Shaped[Tensor, "..."]]:
    """Return the share of a state dict that a rank holds."""
    share = {}
    for name, tensor in full.items():
        layer, _, parameter = name.rpartition(".")
        part = shards.get(layer)
        share[name] = part.shard(parameter, tensor, ranks=ranks, rank=rank) if part else tensor.clone()
    return share
