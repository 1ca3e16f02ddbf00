"""Trace the memory of a training step and of an evaluation, on tensors without memory.

One phase of a run is traced at a time, on top of what is always held: the weights and the optimizer's moments.
"""

from collections import Counter
from contextlib import nullcontext
from itertools import chain

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from data.config import TeacherKind
from data.features.schema import FeatureSchema
from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.batch import Batch
from models.device.memory_trace import MemoryTracer, TracedPhase, fake_model
from models.drafts.base import Draft, Extras, Needs
from models.drafts.loss import compute_loss
from models.losses.chunked import map_chunks_by
from models.losses.distributions import TopKLogits
from models.meta_model import MetaTarget, collect_models
from models.targets.attention import without_kernel
from models.targets.language_model import TargetOutput
from train.config.run import TrainConf
from train.distributed.units import gathered_copies
from train.optim import allocate_optimizer_states, build_optimizers, trained_parameters

TARGET, FROZEN, TRAINED, GATHERED = "target", "draft, frozen", "draft, trained", "draft, gathered"
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "cache"
PERSISTENT_PARTS = (TARGET, FROZEN, TRAINED, OPTIMIZER)
TARGET_PASS, DRAFT_PASS, OPTIMIZER_STEP, EVALUATION = ("target reads", "draft learns", "optimizer steps", "evaluation")


def trace_run(
    conf: TrainConf,
    target: MetaTarget,
    draft: Draft,
    *,
    prompt_tokens: int,
    accelerator: bool = False,
    scores_in_memory: bool = False,
    gathers_draft: bool = False,
    stored_schema: FeatureSchema | None = None,
) -> dict[str, TracedPhase]:
    """Return the traced phases of a run by name, with held-out prompts of `prompt_tokens` tokens.

    `accelerator`: whether optimizers update all weights at once and attention runs in chunks, as on accelerators.
    `scores_in_memory`: whether the rest of attention has all its scores in memory. `gathers_draft`: whether processes
    share the draft, and each gathers it for a pass. `stored_schema`: of the feature store that replaces target passes.
    """
    draft.recomputes = conf.optim.recompute
    drawn = draft.prepare_batch(fullest_batch(1, 1), step=0, generators=[np.random.default_rng()])
    widths = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    chunked = without_kernel() if accelerator else nullcontext()
    models = [target.model, *collect_models(draft)]
    faked = fake_model(models, vocab=widths, scores_in_memory=scores_in_memory)
    with chunked, faked as tracer, map_chunks_by(tracer.map_chunks):
        optimizers = _build_optimizers(tracer, conf, target, draft.eval())
        rows = conf.optim.micro_batch_rows(conf.optim.rows_per_step)
        batch = fullest_batch(rows, conf.data.row_length)
        extras = {  # a number without dimensions, or drawn by row and position
            name: torch.empty(batch.input_ids.shape[: extra.ndim] + extra.shape[2:], dtype=extra.dtype)
            for name, extra in drawn.items()
        }
        trained = trained_parameters(draft)
        if conf.optim.rows_per_step > rows and not gathers_draft:
            _hold_gradients(tracer, trained)  # of an earlier micro-batch
        phases = _trace_micro_batch(
            tracer, target, draft, batch, extras, gathers_draft=gathers_draft, schema=stored_schema
        )
        if gathers_draft:
            _hold_gradients(tracer, trained)
        with tracer.trace_phase(OPTIMIZER_STEP) as optimizer_phase:
            torch.nn.utils.clip_grad_norm_(trained, conf.optim.max_grad_norm)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["foreach"] = accelerator
                optimizer.step()
        draft.zero_grad()
        phases.append(optimizer_phase)
        if conf.measure:
            phases.append(_trace_evaluation(tracer, conf, target, draft, prompt_tokens=prompt_tokens))
        elif stored_schema is not None:
            with tracer.trace_phase(EVALUATION) as phase, torch.no_grad():
                row = fullest_batch(1, conf.data.row_length)
                compute_loss(
                    draft.loss_terms(
                        row, fake_stored_output(stored_schema, draft.needs, row.input_ids.shape, target.device.dtype)
                    )
                )
            phases.append(phase)
        del optimizers  # keeps their state alive until here
    return {phase.name: phase for phase in phases}


def persistent_memory(conf: TrainConf, target: MetaTarget, draft: Draft, *, gathers_draft: bool = False) -> TracedPhase:
    """Return the memory that every training step holds, whatever its rows; nothing is traced, so it is fast."""
    with fake_model([target.model, *collect_models(draft)], vocab=[]) as tracer:
        optimizers = _build_optimizers(tracer, conf, target, draft)
        persistent = Counter({part: tracer.live_bytes[part] for part in PERSISTENT_PARTS})
        del optimizers  # keeps their state alive until here
        with gathered_copies(draft, target.device.dtype) if gathers_draft else nullcontext([]) as copies:
            persistent[GATHERED] = sum(copy.nbytes for copy in copies)
            persistent[GRADIENTS] = sum(parameter.nbytes for parameter in trained_parameters(draft))
    return TracedPhase(name=DRAFT_PASS, peak_bytes=persistent)


def fullest_batch(rows: int, length: int) -> Batch:
    """Build a batch of one document per row, all of it answers: no batch needs more memory."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        answer_mask=torch.ones_like(ids, dtype=torch.bool),
        document_ids=torch.zeros_like(ids),
        positions=torch.arange(length).expand_as(ids).clone(),
    )


def _build_optimizers(tracer: MemoryTracer, conf: TrainConf, target: MetaTarget, draft: Draft) -> list[Optimizer]:
    """Build the optimizers with their states, and label the states and all weights."""
    tracer.label_tensors(FROZEN, [*draft.parameters(), *draft.buffers()])
    tracer.label_tensors(TRAINED, trained_parameters(draft))
    tracer.label_tensors(TARGET, [*target.model.parameters(), *target.model.buffers()])
    optimizers, _ = build_optimizers(conf.optim, draft)
    allocate_optimizer_states(optimizers)
    states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    tracer.label_tensors(OPTIMIZER, chain.from_iterable(state.values() for state in states))
    return optimizers


def _trace_micro_batch(
    tracer: MemoryTracer,
    target: MetaTarget,
    draft: Draft,
    batch: Batch,
    extras: Extras,
    *,
    gathers_draft: bool,
    schema: FeatureSchema | None,
) -> list[TracedPhase]:
    """Trace the passes of a micro-batch."""
    phases, dtype = [], target.device.dtype
    if schema is None:
        with tracer.trace_phase(TARGET_PASS) as target_phase, torch.no_grad():
            target_output = run_target(target, draft.needs.layers, batch)
        phases.append(target_phase)
    else:
        target_output = fake_stored_output(schema, draft.needs, batch.input_ids.shape, dtype)
    gathered = gathered_copies(draft, dtype) if gathers_draft else nullcontext([])
    with tracer.trace_phase(DRAFT_PASS) as draft_phase, gathered as copies:
        tracer.label_tensors(GATHERED, copies)
        for parameter in trained_parameters(draft):
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: tracer.label_tensors(GRADIENTS, [parameter.grad])
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = compute_loss(draft.loss_terms(batch, target_output, **extras))
        loss.total.backward()
    return [*phases, draft_phase]


def _hold_gradients(tracer: MemoryTracer, trained: list[nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    tracer.label_tensors(GRADIENTS, [parameter.grad for parameter in trained])


def fake_stored_output(schema: FeatureSchema, needs: Needs, shape: torch.Size, dtype: torch.dtype) -> TargetOutput:
    """Build all-zero features in the shapes that data/features/reader.py returns."""
    hidden_size, k = schema.hidden_size, schema.top_k
    topk = (
        TopKLogits(
            ids=torch.zeros(*shape, k, dtype=torch.int64),
            log_probs=torch.zeros(*shape, k),
            rest=torch.zeros(shape),
            vocab_size=schema.vocab_size,
        )
        if schema.teacher is TeacherKind.topk
        else None
    )
    hidden_width = hidden_size if needs.hidden or topk is None else 1
    captured_width = len(needs.layers) * hidden_size
    return TargetOutput(
        captured=torch.zeros(*shape, captured_width, dtype=dtype) if captured_width else None,
        hidden=torch.zeros(*shape, hidden_width, dtype=dtype),
        topk=topk,
    )


def _trace_evaluation(
    tracer: MemoryTracer, conf: TrainConf, target: MetaTarget, draft: Draft, *, prompt_tokens: int
) -> TracedPhase:
    """Trace train/quick_eval.py: the prefill of as many prompts as are decoded at a time, then the loss of one text."""
    rows, slots = conf.held_out.largest_batch, prompt_tokens + conf.evaluation.quick_tokens
    with tracer.trace_phase(EVALUATION) as phase, torch.no_grad():
        decoder = Decoder(
            draft.get_verifying_target(target),
            draft,
            conf.tree.build(),
            sampling=conf.evaluation.sampling,
            slots=slots,
            batch=rows,
        )
        cache, _ = decoder.session.buffers
        tracer.label_tensors(CACHE, [*cache.keys, *cache.values])
        decoder.decode([[0] * prompt_tokens] * rows, row_ids=range(rows), max_new_tokens=1)
        del decoder, cache
        batch = fullest_batch(1, slots)
        compute_loss(draft.loss_terms(batch, run_target(target, draft.needs.layers, batch)))
    return phase
