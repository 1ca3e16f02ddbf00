"""A process of a layout without memory: what it holds, gathers and reduces of target, draft and moments.

PyTorch's fake process group moves nothing, and FSDP2 shards over it as over a real one. The other processes of the
layout do not exist.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from models.device.memory_trace import MemoryTracer, TracedPhase, fake_model
from models.drafts.base import Draft
from models.drafts.loss import LossModule
from models.meta_model import MetaTarget, collect_models
from models.parallel.dtensor import is_sharded
from train.config.run import TrainConf
from train.distributed.units import count_gathered_bytes, shard_in_units, shard_rows
from train.optim import allocate_optimizer_states, build_optimizers, trained_parameters
from train.planning.layout import ProcessLayout

TARGET, FROZEN, TRAINED, GATHERED = "target", "draft, frozen", "draft, trained", "draft, gathered"
SPLIT_HEADS = "draft, split heads"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
START = "start"
PERSISTENT_PARTS = (TARGET, FROZEN, TRAINED, SPLIT_HEADS, OPTIMIZER)
_numbers = count()  # of fake meshes


@dataclass(kw_only=True)
class FakeProcess:
    """The models of a process of a layout before its first step, without memory, labeled by part."""

    conf: TrainConf
    layout: ProcessLayout
    tracer: MemoryTracer
    target: MetaTarget
    draft: Draft
    loss_module: LossModule
    shards: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)  # of weights, as ZeRO-1 steps them
    start: TracedPhase | None = None  # before ZeRO-1 shares the moments; None if it shares none

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        return trained_parameters(self.draft)

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers with their states."""
        optimizers, _ = build_optimizers(self.conf.optim, self.draft)
        if self.layout.shards_moments:
            with self.tracer.trace_phase(START) as self.start:
                self._allocate_states(optimizers)  # a saved state is loaded before moments are shared
                self.start.peak_bytes = self.tracer.live_bytes.copy()  # with their labels
            for optimizer in optimizers:
                optimizer.state.clear()
            self.shards = {weight: nn.Parameter(self._take_shard(weight.detach())) for weight in self.trained}
            self.tracer.label_tensors(OPTIMIZER, self.shards.values())
            for weight in self.draft.parameters():
                weight.data = weight.data.to(self.target.device.dtype)
            self.label_weights()
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
                group["params"] = [self.shards[weight] for weight in group["params"]]
        self._allocate_states(optimizers)
        return optimizers

    def _allocate_states(self, optimizers: list[Optimizer]) -> None:
        allocate_optimizer_states(optimizers)
        states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
        self.tracer.label_tensors(OPTIMIZER, chain.from_iterable(state.values() for state in states))

    def _take_shard(self, tensor: Tensor) -> Tensor:
        return shard_rows(tensor, ranks=self.layout.processes, rank=0).clone()

    def step_optimizers(self, *, foreach: bool) -> None:
        """Clip the gradients and update the weights, `foreach` all at once."""
        torch.nn.utils.clip_grad_norm_(self.trained, self.conf.optim.max_grad_norm)
        for weight, shard in self.shards.items():
            assert weight.grad is not None
            shard.grad = self._take_shard(weight.grad.float())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["foreach"] = foreach
            optimizer.step()
        for shard in self.shards.values():
            shard.grad = None

    def label_gathered(self, part: str, module: nn.Module) -> None:
        """Count the gathered weights of a module, which FSDP2 allocates and frees, as `part`."""
        gathered = [weight for weight in module.parameters() if not is_sharded(weight)]
        self.tracer.label_tensors(part, gathered, resized=True)

    def label_weights(self) -> None:
        """Label the weights that stay."""
        self.tracer.label_tensors(TARGET, [*self.target.model.parameters(), *self.target.model.buffers()])
        self.tracer.label_tensors(FROZEN, [*self.draft.parameters(), *self.draft.buffers()])
        self.tracer.label_tensors(TRAINED, trained_parameters(self.draft))
        heads = list_split_heads(self.draft, self.layout)
        self.tracer.label_tensors(SPLIT_HEADS, [head.weight for head in heads if is_sharded(head.weight)])

    def watch_pass(self) -> None:
        """Label what a pass of the draft gathers, and its gradients when they come to be."""
        if self.layout.gathers_draft:
            self.label_gathered(GATHERED, self.loss_module)
        for weight in trained_parameters(self.draft):
            weight.register_post_accumulate_grad_hook(
                lambda weight: self.tracer.label_tensors(GRADIENTS, [weight.grad])
            )

    def label_gradients(self) -> None:
        self.tracer.label_tensors(GRADIENTS, [weight.grad for weight in self.trained])

    def hold_gradients(self) -> None:
        """Give the weights gradients, as before a later micro-batch."""
        for weight in self.trained:
            weight.grad = torch.empty_like(weight)
        self.label_gradients()


@contextmanager
def fake_process(
    conf: TrainConf, target: MetaTarget, draft: Draft, layout: ProcessLayout, *, scores_in_memory: bool = False
) -> Iterator[FakeProcess]:
    """Let target and draft exist in the block as a process of the layout holds them; they stay so."""
    widths = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    loss_module = LossModule(draft.eval(), target.device, compiled=False)
    with ExitStack() as stack:
        units = []
        if layout.gathers_draft:
            mesh = stack.enter_context(fake_mesh(layout.processes))
            heads = list_split_heads(draft, layout)
            shard_in_units(loss_module, mesh, dtype=target.device.dtype, split_heads=heads)
        if layout.shards_target:
            units = shard_target(target, stack.enter_context(fake_mesh(layout.data)))
        models = [target.model, *collect_models(draft)]
        tracer = stack.enter_context(fake_model(models, vocab=widths, scores_in_memory=scores_in_memory))
        process = FakeProcess(
            conf=conf, layout=layout, tracer=tracer, target=target, draft=draft, loss_module=loss_module
        )
        for unit in units:
            unit.register_forward_pre_hook(lambda unit, _: process.label_gathered(TARGET, unit))
        loss_module.register_forward_pre_hook(lambda *_: process.watch_pass())
        process.label_weights()
        _ = process.optimizers
        if units:
            with torch.no_grad():
                target.model(input_ids=torch.zeros(1, 2, dtype=torch.int64))  # as loading does
        yield process


def list_split_heads(draft: Draft, layout: ProcessLayout) -> list[nn.Linear]:
    """Return the heads of a draft that the layout never gathers."""
    return draft.list_loss_heads() if layout.split_heads else []


def shard_target(target: MetaTarget, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard a target in the units of transformers, and return these; norm and head stay gathered after a pass.

    transformers ties weights after it shards: a tied head is no unit, so that the whole model gathers its weight too.
    """
    embeddings, units = target.model.get_input_embeddings(), [*target.decoder.layers]
    is_tied = embeddings.weight is target.head.weight
    if is_tied:
        target.head.weight = nn.Parameter(embeddings.weight.clone(), requires_grad=False)
    else:
        units.append(embeddings)
    last = [target.decoder.norm, embeddings if is_tied else target.head]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(target.model, mesh=mesh)
    if is_tied:
        target.head.weight = embeddings.weight
    return [*units, *last, target.model]


@contextmanager
def fake_mesh(processes: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of fake processes, of which this one is the first; in a real group, its first process alone can.

    TORCH_DIST_INIT_BARRIER=1 would let it wait for the others.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401 # deferred: slow; PyTorch 2.9 needs it to trace them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        # The other processes of a real group do not plan. Some packages replace the function by one without the key.
        alone: dict[str, Any] = {} if dist.get_backend() == "fake" else {"use_local_synchronization": True}
        group: Any = dist.new_group([*range(processes)], backend="fake", **alone)
        stack.callback(dist.destroy_process_group, group)
        # DTensor caches by mesh: a name of its own keeps a real mesh of as many processes from equaling this one.
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"fake {next(_numbers)}",))


def persistent_memory(conf: TrainConf, target: MetaTarget, draft: Draft, layout: ProcessLayout) -> Counter[str]:
    """Return the bytes by part that every training step holds, whatever its rows; nothing is traced, so it is fast."""
    dtype, heads = target.device.dtype, list_split_heads(draft, layout)
    gathered = count_gathered_bytes(draft, dtype, heads) if layout.gathers_draft else {}
    gathered_gradients = sum(gathered[weight] for weight in trained_parameters(draft) if gathered)
    with fake_process(conf, target, draft, layout) as process, process.tracer.trace_phase("every step") as phase:
        held = Counter({part: phase.peak_bytes[part] for part in PERSISTENT_PARTS})
    held[GATHERED] = sum(gathered.values())
    held[GRADIENTS] = gathered_gradients or sum(weight.nbytes for weight in process.trained)
    held[GRADIENTS] += held[SPLIT_HEADS]  # in fp32, as the heads are
    return held
