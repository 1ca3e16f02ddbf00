"""Trace the memory of a training step and of an evaluation, on tensors without memory.

One phase of a run is traced at a time, on top of what is always held: the weights and the optimizer's moments.
"""

from contextlib import nullcontext

import numpy as np
import torch

from data.config import TeacherKind
from data.features.schema import FeatureSchema
from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.batch import Batch
from models.device.memory_trace import TracedPhase
from models.drafts.base import Draft, Extras, Needs
from models.drafts.loss import compute_loss
from models.losses.distributions import TopKLogits
from models.meta_model import MetaTarget
from models.parallel.dtensor import full_params
from models.targets.attention import without_kernel
from models.targets.language_model import TargetOutput
from train.config.run import TrainConf
from train.planning.fake_process import FakeProcess, fake_process
from train.planning.layout import ProcessLayout

CACHE = "cache"
TARGET_PASS, DRAFT_PASS, OPTIMIZER_STEP, EVALUATION = ("target reads", "draft learns", "optimizer steps", "evaluation")


def trace_run(
    conf: TrainConf,
    target: MetaTarget,
    draft: Draft,
    layout: ProcessLayout,
    *,
    prompt_tokens: int,
    accelerator: bool = False,
    scores_in_memory: bool = False,
    stored_schema: FeatureSchema | None = None,
) -> dict[str, TracedPhase]:
    """Return the traced phases of a process by name, with held-out prompts of `prompt_tokens` tokens.

    A split target is cut to this process's part already. `accelerator`: whether optimizers update all weights at once
    and attention runs in chunks, as on accelerators. `scores_in_memory`: whether the rest of attention has all its
    scores in memory. `stored_schema`: of the feature store that replaces target passes.
    """
    draft.recomputes = conf.optim.recompute
    drawn = draft.prepare_batch(fullest_batch(1, 1), step=0, generators=[np.random.default_rng()])
    chunked = without_kernel() if accelerator else nullcontext()
    with chunked, fake_process(conf, target, draft, layout, scores_in_memory=scores_in_memory) as process:
        tracer = process.tracer
        batch = fullest_batch(layout.rows, conf.data.row_length)
        extras = {  # a number without dimensions, or drawn by row and position
            name: torch.empty(batch.input_ids.shape[: extra.ndim] + extra.shape[2:], dtype=extra.dtype)
            for name, extra in drawn.items()
        }
        if layout.has_buckets or layout.micros > 1:
            process.hold_gradients()
        phases = _trace_micro_batch(process, batch, extras, schema=stored_schema)
        process.label_gradients()
        with tracer.trace_phase(OPTIMIZER_STEP) as optimizer_phase:
            process.step_optimizers(foreach=accelerator)
        phases.append(optimizer_phase)
        if not layout.has_buckets:
            draft.zero_grad()
        weights = full_params(draft, dtype=target.device.dtype)
        with tracer.trace_phase(EVALUATION) as phase, torch.no_grad(), weights:
            process.label_weights()
            if conf.measure:
                _evaluate(process, conf, prompt_tokens=prompt_tokens)
            elif stored_schema is not None:
                row = fullest_batch(1, conf.data.row_length)
                stored = fake_stored_output(stored_schema, draft.needs, row.input_ids.shape, target.device.dtype)
                compute_loss(draft.loss_terms(row, stored))
        if conf.measure or stored_schema is not None:
            phases.append(phase)
        if process.start is not None:
            phases.insert(0, process.start)
    return {phase.name: phase for phase in phases}


def fullest_batch(rows: int, length: int) -> Batch:
    """Build a batch of one document per row, all of it answers: no batch needs more memory."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        answer_mask=torch.ones_like(ids, dtype=torch.bool),
        document_ids=torch.zeros_like(ids),
        positions=torch.arange(length).expand_as(ids).clone(),
    )


def _trace_micro_batch(
    process: FakeProcess, batch: Batch, extras: Extras, *, schema: FeatureSchema | None
) -> list[TracedPhase]:
    """Trace the passes of a micro-batch."""
    tracer, target, layers = process.tracer, process.target, process.draft.needs.layers
    phases, dtype = [], target.device.dtype
    if schema is None:
        with tracer.trace_phase(TARGET_PASS) as target_phase, torch.no_grad():
            target_output = run_target(target, layers, batch)
        phases.append(target_phase)
    else:
        target_output = fake_stored_output(schema, process.draft.needs, batch.input_ids.shape, dtype)
    with tracer.trace_phase(DRAFT_PASS) as draft_phase:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = process.loss_module(batch, target_output, extras)
        loss.total.backward()
    return [*phases, draft_phase]


def fake_stored_output(schema: FeatureSchema, needs: Needs, shape: torch.Size, dtype: torch.dtype) -> TargetOutput:
    """Build all-zero features in the shapes that data/features/reader.py returns."""
    hidden_size, topk = schema.hidden_size, None
    if schema.teacher is TeacherKind.topk:
        log_probs, rest = torch.zeros(*shape, schema.top_k), torch.zeros(shape)
        topk = TopKLogits(ids=log_probs.long(), log_probs=log_probs, rest=rest, vocab_size=schema.vocab_size)
    hidden_width = hidden_size if needs.hidden or topk is None else 1
    captured_width = len(needs.layers) * hidden_size
    return TargetOutput(
        captured=torch.zeros(*shape, captured_width, dtype=dtype) if captured_width else None,
        hidden=torch.zeros(*shape, hidden_width, dtype=dtype),
        topk=topk,
    )


def _evaluate(process: FakeProcess, conf: TrainConf, *, prompt_tokens: int) -> None:
    """Do what train/quick_eval.py does: the prefill of as many prompts as are decoded at a time, the loss of a text."""
    target, draft = process.target, process.draft
    rows, slots = conf.held_out.largest_batch, prompt_tokens + conf.evaluation.quick_tokens
    verifier, sampling = draft.get_verifying_target(target), conf.evaluation.sampling
    decoder = Decoder(verifier, draft, conf.tree.build(), sampling=sampling, slots=slots, batch=rows)
    cache, _ = decoder.session.buffers
    process.tracer.label_tensors(CACHE, [*cache.keys, *cache.values])
    decoder.decode([[0] * prompt_tokens] * rows, row_ids=range(rows), max_new_tokens=1)
    del decoder, cache
    batch = fullest_batch(1, slots)
    compute_loss(draft.loss_terms(batch, run_target(target, draft.needs.layers, batch)))
