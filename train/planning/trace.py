"""Trace the memory of a training step and of an evaluation, on tensors without memory.

The phases are those of a run: the target's pass over a batch (none with a feature store), the
draft's loss and its gradient, and the optimizer step; at intervals, held-out prompts are decoded.
One phase runs at a time, on top of what is always held: the weights and the optimizer's moments.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.features.schema import FeatureSchema, TeacherKind
from infer.engine.admission import bucket_length
from infer.engine.session import Session
from models.device.memory_trace import MemoryTracer, TracedPhase, fake_model
from models.distill.topk_logits import TopKLogits
from models.drafts.base import Batch, Draft, Needs, SpeculativePair
from models.meta_model import MetaTarget, collect_models
from models.target.language_model import TargetOutput
from train.config import TrainConf
from train.run_dir import trained_parameters

TARGET, FROZEN, TRAINED = "target", "draft, frozen", "draft, trained"
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "cache"
PERSISTENT_PARTS = (TARGET, FROZEN, TRAINED, OPTIMIZER)
TARGET_PASS, DRAFT_PASS, OPTIMIZER_STEP, EVALUATION = (
    "target reads",
    "draft learns",
    "optimizer steps",
    "evaluation",
)


@dataclass(kw_only=True)
class MemoryTrace:
    """Memory, operations and traffic of one process, by phase."""

    phases: dict[str, TracedPhase]
    tokens: int  # of a batch

    @property
    def peak_phase(self) -> TracedPhase:
        return max(self.phases.values(), key=lambda phase: phase.peak_bytes.total())

    def peak_bytes(self, *parts: str) -> int:
        """Return the most bytes that these parts hold together in a training step."""
        phases = [phase for name, phase in self.phases.items() if name != EVALUATION]
        return max(sum(phase.peak_bytes[part] for part in parts) for phase in phases)


def trace_run(
    conf: TrainConf, target: MetaTarget, draft: Draft, *, prompt_tokens: int, foreach: bool = False,
    stored_schema: FeatureSchema | None = None,
) -> MemoryTrace:  # fmt: skip
    """Trace a run with held-out prompts of `prompt_tokens` tokens.

    `foreach`: how accelerators step. `stored_schema`: of the feature store with the rows, if any.
    """
    widths = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    with fake_model([target.model, *collect_models(draft)], vocab=widths) as tracer:
        _label_weights(tracer, target, draft)
        batch = fullest_batch(conf.optim.batch_size, conf.data.length)
        phases, optimizers = _trace_training(
            tracer, conf, target, draft.eval(), batch, foreach=foreach, stored_schema=stored_schema
        )
        phases.append(
            _trace_evaluation(tracer, conf, target, draft.eval(), prompt_tokens=prompt_tokens)
        )
        del optimizers  # keeps their state alive until here
    return MemoryTrace(
        phases={phase.name: phase for phase in phases}, tokens=batch.input_ids.numel()
    )


def persistent_memory(conf: TrainConf, target: MetaTarget, draft: Draft) -> TracedPhase:
    """Return what every training step holds, whatever its rows; takes a fraction of a second."""
    with fake_model([target.model, *collect_models(draft)], vocab=[]) as tracer:
        _label_weights(tracer, target, draft)
        optimizers = _build_stepped_optimizers(tracer, conf, draft, foreach=False)
        persistent = Counter({part: tracer.live_bytes[part] for part in PERSISTENT_PARTS})
        del optimizers  # keeps their state alive until here
    persistent[GRADIENTS] = persistent[TRAINED]
    return TracedPhase(name=DRAFT_PASS, peak_bytes=persistent)


def fullest_batch(rows: int, length: int) -> Batch:
    """Build a batch of one document a row, all of it answers: no batch needs more memory."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        answer_mask=torch.ones_like(ids, dtype=torch.bool),
        document_ids=torch.zeros_like(ids),
        positions=torch.arange(length).expand_as(ids).clone(),
    )


def _label_weights(tracer: MemoryTracer, target: MetaTarget, draft: Draft) -> None:
    tracer.label_tensors(FROZEN, [*draft.parameters(), *draft.buffers()])
    tracer.label_tensors(TRAINED, trained_parameters(draft))
    tracer.label_tensors(TARGET, [*target.model.parameters(), *target.model.buffers()])


def _trace_training(
    tracer: MemoryTracer,
    conf: TrainConf,
    target: MetaTarget,
    draft: Draft,
    batch: Batch,
    *,
    foreach: bool,
    stored_schema: FeatureSchema | None,
) -> tuple[list[TracedPhase], list[Optimizer]]:
    """Trace a step of train/loop.py; a second micro-batch adds to the gradients of the first."""
    trained = trained_parameters(draft)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(_gradient_hook(tracer))
    optimizers = _build_stepped_optimizers(tracer, conf, draft, foreach=foreach)
    if conf.optim.accumulation > 1:
        _allocate_gradients(tracer, trained)
    phases = _trace_micro_batch(tracer, target, draft, batch, stored_schema)
    with tracer.trace_phase(OPTIMIZER_STEP) as steps:
        torch.nn.utils.clip_grad_norm_(trained, conf.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
    draft.zero_grad()
    return [*phases, steps], optimizers


def _trace_micro_batch(
    tracer: MemoryTracer,
    target: MetaTarget,
    draft: Draft,
    batch: Batch,
    schema: FeatureSchema | None,
) -> list[TracedPhase]:
    is_bf16 = target.device.dtype is torch.bfloat16
    phases: list[TracedPhase] = []
    if schema is None:
        with tracer.trace_phase(TARGET_PASS) as target_phase, torch.no_grad():
            target_output = target.forward_hidden(
                batch.input_ids, positions=batch.positions, mask=batch.attention_mask(),
                layers=draft.needs.layers,
            )  # fmt: skip
        phases.append(target_phase)
    else:
        target_output = fake_stored_output(
            schema, draft.needs, batch.input_ids.shape, target.device.dtype
        )
    with tracer.trace_phase(DRAFT_PASS) as draft_phase:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = draft.loss(batch, target_output)
        loss.total.backward()
    return [*phases, draft_phase]


def fake_stored_output(
    schema: FeatureSchema, needs: Needs, shape: torch.Size, dtype: torch.dtype
) -> TargetOutput:
    """Build features in the shapes that data/features/reader.py returns."""
    hidden_size, k, topk = schema.hidden_size, schema.top_k, None
    if schema.teacher is TeacherKind.topk:
        topk = TopKLogits(
            ids=torch.zeros(*shape, k, dtype=torch.int64), log_probs=torch.zeros(*shape, k),
            rest=torch.zeros(shape), vocab_size=schema.vocab_size,
        )  # fmt: skip
    hidden_width = hidden_size if needs.hidden or topk is None else 0
    return TargetOutput(
        captured=torch.zeros(*shape, len(needs.layers) * hidden_size, dtype=dtype),
        hidden=torch.zeros(*shape, hidden_width, dtype=dtype), topk=topk,
    )  # fmt: skip


def _build_stepped_optimizers(
    tracer: MemoryTracer, conf: TrainConf, draft: Draft, *, foreach: bool
) -> list[Optimizer]:
    """Build optimizers and take their first step, which allocates their state."""
    optimizers, _ = conf.optim.build(draft)
    _allocate_gradients(tracer, trained_parameters(draft))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        optimizer.step()
        values = [entry for state in optimizer.state.values() for entry in state.values()]
        tracer.label_tensors(OPTIMIZER, [entry for entry in values if isinstance(entry, Tensor)])
    draft.zero_grad()
    return optimizers


def _allocate_gradients(tracer: MemoryTracer, trained: list[nn.Parameter]) -> None:
    """Allocate gradients, as an earlier micro-batch leaves them."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    tracer.label_tensors(GRADIENTS, [parameter.grad for parameter in trained])


def _gradient_hook(tracer: MemoryTracer) -> Callable[[Tensor], None]:
    return lambda parameter: tracer.label_tensors(GRADIENTS, [parameter.grad])


def _trace_evaluation(
    tracer: MemoryTracer, conf: TrainConf, target: MetaTarget, draft: Draft, *, prompt_tokens: int
) -> TracedPhase:
    """Trace train/quick_eval.py: the prefill of all held-out prompts together, and the draft's."""
    rows, tree = conf.eval_prompts, conf.tree.build()
    pair = SpeculativePair(target=target, draft=draft)
    with tracer.trace_phase(EVALUATION) as phase, torch.no_grad():
        session = Session(
            pair.verifying_target, draft, tree, sampling=conf.evaluation.sampling,
            slots=prompt_tokens + conf.evaluation.quick_tokens, batch=rows,
        )  # fmt: skip
        tracer.label_tensors(CACHE, [*session.cache.keys, *session.cache.values])
        ids = torch.zeros(rows, min(bucket_length(prompt_tokens), session.slots), dtype=torch.int64)
        lengths = torch.full((rows,), prompt_tokens)
        session.prefill(ids, lengths, lengths)
    return phase
