"""Estimate a draft's gain on a machine from traces of decoding, without loading any weights.

A pass takes at least the time to read its weights and the cache once, and at least that of its matrix products (a
roofline estimate).
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import torch

from infer.config import DecodePlanConf
from infer.engine import steps
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.engine.row_tensors import list_tensors
from infer.measure.context_limits import check_context
from infer.report.number_format import Table, choose_console, to_rich_table
from models.device.config import MachineConf
from models.device.machine_specs import check_dtype, core_flops
from models.device.memory_trace import TracedPhase, fake_model
from models.drafts.base import Draft
from models.io.console import CONSOLE, print_line
from models.io.errors import UserError, require
from models.io.files import open_output_file
from models.meta_model import MetaTarget, build_meta_draft, build_meta_target, collect_models, shard_target
from models.parallel.tensor_parallel import plan_shards
from models.targets.attention import without_kernel
from models.targets.precision import resolve_machine
from models.targets.pretrained import read_context_length
from models.trees.keyed_noise import split_row_ids

GIB, MS = 2**30, 1000
TARGET, DRAFT, CACHE, DRAFT_CACHE = "target", "draft", "cache", "draft cache"
PROMPT, ONE_TOKEN, VERIFY, PROPOSE = "prompt", "one token", "verification", "proposal"


@dataclass(frozen=True, kw_only=True)
class DecodeOption:
    """The best-case memory and times of decoding with a target split over `tensor` cores."""

    tensor: int
    bytes: int  # peak memory per core
    parts: dict[str, int]  # bytes of the peak, by kind
    fits: bool
    prompt_s: float
    alone_s: float  # per token without a draft
    verify_s: float
    propose_s: float
    most: int  # tokens per round if its longest path is accepted

    @property
    def break_even_length(self) -> float:
        """Return the acceptance length above which the draft makes decoding faster."""
        return (self.verify_s + self.propose_s) / self.alone_s


def list_options(conf: DecodePlanConf) -> list[DecodeOption]:
    """Return one option per power of two of cores that can hold the target; raise UserError if none can."""
    check_context(read_context_length(conf.target), conf.context, key="context")
    machine, dtype = resolve_machine(conf.machine, conf.device, conf.target)
    check_dtype(machine, dtype)
    meta_target, options = build_meta_target(conf.target, dtype), []
    for tensor in (2**n for n in range(machine.total_cores.bit_length())):
        try:
            plan_shards(meta_target.model, tensor, is_native=conf.device.is_native)
        except UserError:
            break
        if meta_target.num_parameters * dtype.itemsize / tensor < machine.core_bytes:
            options.append(_estimate_option(conf, machine, dtype, tensor))
    require(
        bool(options),
        f"machine: must hold the target, got {machine.name} for {meta_target.num_parameters:,} "
        "parameters; choose a larger one",
    )
    return options


def _estimate_option(conf: DecodePlanConf, machine: MachineConf, dtype: torch.dtype, tensor: int) -> DecodeOption:
    target = build_meta_target(conf.target, dtype)
    draft = build_meta_draft(conf.draft, target).to(dtype).eval()
    shard_target(target, tensor, is_native=conf.device.is_native)
    phases = trace_phases(conf, target, draft, scores_in_memory=machine.scores_in_memory)
    peak = max(phases, key=lambda phase: phase.peak_bytes.total()).peak_bytes
    passes = draft.passes(conf.tree.build().depth)
    seconds = {
        phase.name: estimate_seconds(phase, machine, draft_cores=tensor, draft_passes=passes) for phase in phases
    }
    for part in (DRAFT, DRAFT_CACHE):
        peak[part] //= tensor
    return DecodeOption(
        tensor=tensor,
        bytes=peak.total(),
        parts=dict(peak),
        fits=peak.total() <= (1 - conf.memory_margin) * machine.core_bytes,
        prompt_s=seconds[PROMPT],
        alone_s=seconds[ONE_TOKEN],
        verify_s=seconds[VERIFY],
        propose_s=seconds[PROPOSE],
        most=conf.tree.build().max_path_length + 1,
    )


@torch.no_grad()
def trace_phases(
    conf: DecodePlanConf, target: MetaTarget, draft: Draft, *, scores_in_memory: bool = False
) -> list[TracedPhase]:
    """Return traces of four phases: prompt, one token without a draft, verification, proposal."""
    vocab = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    models = [target.model, *collect_models(draft)]
    chunked = without_kernel() if scores_in_memory else nullcontext()
    with chunked, fake_model(models, vocab=vocab, scores_in_memory=scores_in_memory) as tracer:
        tracer.label_tensors(DRAFT, [*draft.parameters(), *draft.buffers()])
        tracer.label_tensors(TARGET, [*target.model.parameters(), *target.model.buffers()])
        decoder = Decoder(
            target, draft, conf.tree.build(), sampling=conf.sampling, slots=conf.context, batch=conf.batch
        )
        program, (cache, draft_state) = decoder.program, decoder.session.buffers
        tracer.label_tensors(CACHE, list_tensors(cache))
        tracer.label_tensors(DRAFT_CACHE, list_tensors(draft_state))
        with tracer.trace_phase(PROMPT) as prompt:
            input_ids = torch.zeros(conf.batch, min(bucket_length(conf.prompt_tokens), conf.context), dtype=torch.int64)
            lengths = torch.full((conf.batch,), conf.prompt_tokens)
            state, _, _ = decoder.session.start_prompts(input_ids, lengths, split_row_ids(range(conf.batch)))
        with tracer.trace_phase(ONE_TOKEN) as one_token:
            steps.verify(program, replace(state, proposal=None))
        with tracer.trace_phase(VERIFY) as verify:
            target_output, logits = steps.verify(program, state)
        state, output = steps.accept(program, state, target_output, logits)
        with tracer.trace_phase(PROPOSE) as propose:
            steps.draft(program, state, output)
    return [prompt, one_token, verify, propose]


def estimate_seconds(phase: TracedPhase, machine: MachineConf, *, draft_cores: int, draft_passes: int) -> float:
    """Return the least seconds of a phase: a pass reads weights and cache once, and nothing waits.

    The draft is split over `draft_cores`, those of the target, as serving engines do; the target is split already.
    """
    reads = phase.bytes_read[TARGET] + phase.bytes_read[DRAFT] / draft_cores
    computes = sum(count / core_flops(machine, dtype) for dtype, count in phase.flops_by_dtype.items())
    if phase.name in (ONE_TOKEN, VERIFY):
        reads += phase.peak_bytes[CACHE]
    elif phase.name == PROPOSE:
        reads += draft_passes * phase.peak_bytes[DRAFT_CACHE] / draft_cores
        computes /= draft_cores
    return max(reads / machine.core_bandwidth, computes)


def build_plan_table(options: list[DecodeOption]) -> Table:
    records = (
        {
            "tensor": str(option.tensor),
            "GiB per core": f"{option.bytes / GIB:.2f}",
            "fits": "yes" if option.fits else "no",
            "prompt": f"{MS * option.prompt_s:.2f}",
            "token alone": f"{MS * option.alone_s:.2f}",
            "verify + propose": f"{MS * option.verify_s:.2f} + {MS * option.propose_s:.2f}",
            "acceptance length needed": f"{option.break_even_length:.2f}",
            "speed-up if all is accepted": f"{option.most / option.break_even_length:.2f}",
        }
        for option in options
    )
    return Table.from_records(records, title="Cores per target: at best, in ms", stacked_headers=True)


def summarize_options(conf: DecodePlanConf, options: list[DecodeOption]) -> str:
    """Return a line on the fitting option of least latency, or on how to make one fit."""
    fitting = [option for option in options if option.fits]
    if fitting:
        best = min(fitting, key=lambda option: option.alone_s)
        return (
            f"On {best.tensor} cores: {MS * best.alone_s:.2f} ms per token at best without a draft; this draft wins "
            f"above {best.break_even_length:.2f} tokens per round, of {best.most} at most"
        )
    smallest = min(options, key=lambda option: option.bytes)
    if smallest.parts.get("cache", 0) > smallest.bytes / 2 and conf.batch > 1:
        return f"It does not fit. First change: batch={conf.batch // 2}"
    return "It does not fit: choose a larger machine, or a shorter context"


def print_decode_plan(conf: DecodePlanConf) -> None:
    """Print the plan and, with `output`, write it as JSON."""
    conf.tree.read()
    options = list_options(conf)
    target, method = conf.target.path or conf.target.name, conf.draft.method
    print_line(f"\n{target} with {method} on {conf.machine.name}")
    console = choose_console(CONSOLE)
    console.print(to_rich_table(build_plan_table(options), ruled=console.is_terminal))
    print_line(summarize_options(conf, options))
    if conf.output is not None:
        with open_output_file(conf.output) as file:
            file.write_text(json.dumps([asdict(option) for option in options], indent=2) + "\n")
