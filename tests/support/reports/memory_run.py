"""Measure the memory of a step in several processes, and plan it: memory_run.py FOLDER CASE...

A case is KIND,LAYOUT,DTYPE,MICRO_BATCHES,OVERRIDES. LAYOUT is that of the draft's weights, or `split`: all processes
share the target, and each learns rows of its own, or `all sharded`: the target too, and its pass is measured, or
`tied sharded`: with a head that is the embeddings. Process 0 writes the bytes of each case, measured and planned, to
FOLDER/bytes.json.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3ForCausalLM

from conf.entry import compose
from models.device.device import Device
from models.drafts.registry import build_draft
from models.parallel.dtensor import is_sharded
from models.parallel.processes import leave_processes
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.data.chat import save
from tests.support.data.packed import packed_of
from tests.support.models.tiny import CPU, tiny_tokenizer
from tests.support.reports.planned import GENEROUS, HALF, VOCAB, config
from train.config.run import TrainConf
from train.distributed.build import build_parallel
from train.planning.fake_process import PERSISTENT_PARTS, TARGET, persistent_memory
from train.planning.layout import build_layout
from train.planning.run_plan import build_models
from train.planning.trace import EVALUATION, TARGET_PASS, fullest_batch, trace_run
from train.run.log import MetricLogger
from train.run.state import RunState, flatten_config
from train.trainer import Trainer

LENGTH, PROMPT = 128, 64
KINDS = {
    "eagle1": ["draft=demo-eagle1"],
    "eagle3": ["draft=demo", "draft.layers=[1,2,3]"],
    "medusa": ["draft=demo-medusa"],
    "hydra": ["draft=demo-hydra"],
    "draft model": ["draft=demo-lm", "draft.layers=[0,3]"],
}


def build_conf(*overrides: str) -> TrainConf:
    small = [
        *("optim=adamw", "optim.rows_per_step=2", "optim.compile_loss=false", "tree=chain", "tree.depth=3"),
        f"data.row_length={LENGTH}",
        "held_out.selection=4",
        "run_name=planned",
        "evaluation.max_new_tokens=6",
    ]
    return compose("train", TrainConf, [*small, *overrides])


def build_target(device: Device, **changes: Any) -> Target:
    model = Qwen3ForCausalLM(config(**changes)).to(device.dtype)
    return freeze_model(model, tiny_tokenizer(VOCAB), name="outline", device=device)


def build_trainer(conf: TrainConf, device: Device, folder) -> Trainer:
    """Build a real run of random weights in which every token of the rows is an answer."""
    torch.manual_seed(0)
    parallel = build_parallel(conf.parallel, device, trackers=[])
    target = parallel.build_target(conf) if conf.parallel.splits_target else build_target(device)
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=0)
    full = fullest_batch(conf.optim.rows_per_step, LENGTH)
    rows = packed_of(replace(full, input_ids=torch.randint(1, VOCAB, full.input_ids.shape)))
    state = RunState(folder, flatten_config(conf))
    return Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=rows,
        run_state=state,
        metric_logger=MetricLogger(conf.log, state, parallel.accelerator),
        evaluate=lambda _: {},
    )


def measure_peak_bytes(work) -> int:
    """Run `work`; return the most bytes that the allocator held beyond those at the beginning."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def count_held_bytes(loop: Trainer) -> int:
    """Return the bytes of this process's part of the draft, its gradients and its moments."""
    weights = [*loop.draft.parameters(), *loop.draft.buffers()]
    gradients = [p.grad for p in loop.draft.parameters() if p.grad is not None]
    moments = [m for o in loop.training_state.optimizers for s in o.state.values() for m in s.values()]
    return sum(count_local_bytes(tensor) for tensor in [*weights, *gradients, *moments])


def count_local_bytes(tensor: Tensor) -> int:
    return cast(Any, tensor).to_local().nbytes if is_sharded(tensor) else tensor.nbytes


LAYOUTS = {
    "replicated": ["parallel.tensor=1", "parallel.draft=replicated"],
    "sharded": ["parallel.tensor=1", "parallel.draft=sharded"],
    "split heads": ["parallel.tensor=1", "parallel.draft=sharded", "parallel.split_heads=true"],
    "split": ["parallel.tensor={processes}", "parallel.draft=replicated"],
    "all sharded": ["parallel=sharded"],
    "tied sharded": ["parallel=sharded"],
}


def compare_with_plan(folder: Path, processes: int, case: str) -> tuple[int, int]:
    """Return the most bytes of a step beside the target's, or of its pass if it is sharded, as measured and planned."""
    kind, placement, dtype, micro_batches, *overrides = case.split(",")
    device = {"fp32": CPU, "bf16": HALF}[dtype]
    conf = build_conf(
        *KINDS[kind],
        f"optim.rows_per_step={2 * int(micro_batches) * processes}",
        "optim.micro_batch_size=2",
        f"target.path={folder.parent / ('tied' if placement == 'tied sharded' else 'target')}",
        *(word.format(processes=processes) for word in LAYOUTS[placement]),
        *overrides,
    )
    layout = build_layout(conf, replace(GENEROUS, chips=1, cores=processes), 4, conf.parallel.tensor_size)
    loop = build_trainer(conf, device, folder)
    if layout.shards_target:  # the first pass: later ones free what FSDP2 keeps of the one before
        batch = fullest_batch(layout.rows, LENGTH)
        measured = measure_peak_bytes(lambda: loop.features.compute_features(batch))
    else:
        loop._take_step()  # creates the moments
        # The least of several, because the profiler misses some of what gloo's threads free.
        measured = count_held_bytes(loop) + min(measure_peak_bytes(loop._take_step) for _ in range(3))
    if not loop.parallel.is_main:
        return measured, 0
    phases = trace_run(conf, *build_models(conf, device.dtype, layout.tensor), layout, prompt_tokens=PROMPT)
    if layout.shards_target:
        held = persistent_memory(conf, *build_models(conf, device.dtype, layout.tensor), layout)
        return measured, phases[TARGET_PASS].peak_bytes.total() - sum(held[part] for part in PERSISTENT_PARTS)
    parts = [phase.peak_bytes for name, phase in phases.items() if name != EVALUATION]
    return measured, max(part.total() - part[TARGET] for part in parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main = build_parallel(build_conf().parallel, CPU, trackers=[])
    own = Path(sys.argv[1]) / str(main.accelerator.process_index)
    if main.is_main:
        save(build_target(CPU), own.parent / "target")
        save(build_target(CPU, tie_word_embeddings=True), own.parent / "tied")
    main.barrier()
    results = {case: compare_with_plan(own, main.accelerator.num_processes, case) for case in sys.argv[2:]}
    if main.is_main:
        (Path(sys.argv[1]) / "bytes.json").write_text(json.dumps(results))
    leave_processes()
