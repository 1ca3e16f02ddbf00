"""One round of speculative decoding, traced on tensors without memory: what its passes cost.

The functions are those of a decoder (infer/engine/rounds.py), of any draft and tree. A pass takes
at best the time to read its weights and the cache once, or the time to compute its matrix products.
"""

from dataclasses import dataclass

import torch

from infer.engine import rounds
from infer.engine.decode import Decoder, bucket
from models.device.machine_specs import MachineConf
from models.device.memory_trace import Phase, imagined
from models.drafts.base import Draft
from models.meta_model import Outline, models_of
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree

TARGET, DRAFT, CACHE = "target", "draft", "cache"
PROMPT, ALONE, VERIFY, PROPOSE = "prompt", "one token", "verification", "proposal"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of what is decoded."""

    batch: int
    prompt: int  # tokens
    context: int  # tokens of prompt and answer


@torch.no_grad()
def passes(
    target: Outline, draft: Draft, tree: Tree, sampling: SamplingConf, sizes: Sizes
) -> dict[str, Phase]:
    """A prompt read, a token without a draft, a tree verified, and the next one proposed."""
    vocab = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    with imagined([target.model, *models_of(draft)], vocab=vocab) as tally:
        tally.hold(DRAFT, [*draft.parameters(), *draft.buffers()])
        tally.hold(TARGET, [*target.model.parameters(), *target.model.buffers()])
        decoder = Decoder(
            target, draft, tree, sampling=sampling, slots=sizes.context, batch=sizes.batch
        )
        tally.hold(CACHE, [*decoder.cache.keys, *decoder.cache.values])
        assert decoder.draft is not None
        with tally.phase(PROMPT) as prompt:
            ids = torch.zeros(sizes.batch, bucket(sizes.prompt), dtype=torch.int64)
            lengths = torch.full((sizes.batch,), sizes.prompt)
            plan, cache, layers = decoder.plan, decoder.cache, decoder.layers
            seen, _, scores, history = rounds.prefill(
                target, cache, layers, plan.rule, ids, lengths, lengths
            )
            rows, told, empty = rounds.opened(
                plan.rule, plan.ahead, plan.moved, cache.garbage, lengths, lengths, scores, history
            )
            state, proposal = rounds.begin(decoder.draft, decoder.state, plan, ids, told, seen)
        with tally.phase(ALONE) as alone:
            rounds.score(target, cache, layers, rows, empty)
        with tally.phase(VERIFY) as verify:
            seen, logits = rounds.score(target, cache, layers, rows, proposal)
        rows, emitted = rounds.accept(plan, cache.garbage, rows, proposal, seen, logits)
        with tally.phase(PROPOSE) as propose:
            rounds.go_on(decoder.draft, state, plan, rows, emitted)
    return {phase.name: phase for phase in (prompt, alone, verify, propose)}


def seconds(phase: Phase, machine: MachineConf) -> float:
    """At best: weights are read once a pass, the cache once a round, and nothing waits."""
    reads = phase.read[TARGET] + phase.read[DRAFT]
    if phase.name in (ALONE, VERIFY):
        reads += phase.held[CACHE]
    computes = sum(count / machine.core_flops(dtype) for dtype, count in phase.operations.items())
    return max(reads / machine.core_bytes_s, computes)
