"""Roofline estimate of a round of speculative decoding, traced on tensors without memory.

The trace runs a decoder's own session (infer/engine/session.py) with any draft and tree. A pass
takes at least the time to read its weights and the cache once, and at least the time to compute its
matrix products.
"""

from dataclasses import dataclass, replace

import torch

from infer.engine.admission import bucket_length
from infer.engine.session import Session
from models.device.machine_specs import MachineConf
from models.device.memory_trace import TracedPhase, fake_model
from models.drafts.base import Draft
from models.meta_model import MetaTarget, collect_models
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Proposal, Tree

TARGET, DRAFT, CACHE = "target", "draft", "cache"
PROMPT, ONE_TOKEN, VERIFY, PROPOSE = "prompt", "one token", "verification", "proposal"


@dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """The sizes of a decoding: rows, and tokens of each."""

    batch: int  # rows
    prompt: int  # tokens
    context: int  # tokens of prompt and answer


@torch.no_grad()
def trace_passes(
    target: MetaTarget, draft: Draft, tree: Tree, sampling: SamplingConf, sizes: DecodeSizes
) -> dict[str, TracedPhase]:
    """Trace four phases: prompt, one token without a draft, verification and proposal of a tree."""
    vocab = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    with fake_model([target.model, *collect_models(draft)], vocab=vocab) as tracer:
        tracer.label_tensors(DRAFT, [*draft.parameters(), *draft.buffers()])
        tracer.label_tensors(TARGET, [*target.model.parameters(), *target.model.buffers()])
        session = Session(
            target, draft, tree, sampling=sampling, slots=sizes.context, batch=sizes.batch
        )
        tracer.label_tensors(CACHE, [*session.cache.keys, *session.cache.values])
        with tracer.trace_phase(PROMPT) as prompt:
            input_ids = torch.zeros(sizes.batch, bucket_length(sizes.prompt), dtype=torch.int64)
            lengths = torch.full((sizes.batch,), sizes.prompt)
            state, _, _ = session.prefill(input_ids, lengths, lengths)
        empty = input_ids[:, :0]
        with tracer.trace_phase(ONE_TOKEN) as one_token:
            session.verify(replace(state, proposal=Proposal(ids=empty, parents=empty)))
        with tracer.trace_phase(VERIFY) as verify:
            target_output, logits = session.verify(state)
        state, output = session.accept(state, target_output, logits)
        with tracer.trace_phase(PROPOSE) as propose:
            session.propose(state, output)
    return {phase.name: phase for phase in (prompt, one_token, verify, propose)}


def estimate_seconds(phase: TracedPhase, machine: MachineConf) -> float:
    """Estimate the least seconds of a phase: weights and cache are read once, nothing waits."""
    reads = phase.bytes_read[TARGET] + phase.bytes_read[DRAFT]
    if phase.name in (ONE_TOKEN, VERIFY):
        reads += phase.peak_bytes[CACHE]
    computes = sum(
        count / machine.core_flops(dtype) for dtype, count in phase.flops_by_dtype.items()
    )
    return max(reads / machine.core_bandwidth, computes)
