"""Compile the graphs of a training run and of its evaluation ahead of it."""

import logging
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from data.config import DataSource
from data.eval_prompts.held_out_files import write_held_out
from data.packing.documents import Documents, Packed
from data.packing.pack import pack_documents
from data.sources.rows import document_from_pair
from infer.inputs.command_inputs import load_draft_under_test
from infer.measure.evaluate import compile_eval_graphs
from models.drafts.registry import build_draft
from models.io.files import prepare_folder
from models.io.tracking import TrackerConf
from models.parallel.dtensor import full_params
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.rows.held_out import resolve_evaluation
from train.rows.packed_rows import load_training_rows
from train.rows.row_facts import choose_vocabulary
from train.rows.stored_target import build_run_target
from train.run.log import MetricLogger
from train.run.state import RunState, flatten_config
from train.trainer import Trainer

log = logging.getLogger("train.warmup")


def draw_rows(rows: int, length: int, vocab_size: int, *, overlap: int | None = None) -> Packed:
    """Pack rows of random tokens; the first half of each row is a prompt."""
    token_rows = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    half = length // 2
    documents = Documents.from_documents(document_from_pair(ids[:half], ids[half:]) for ids in token_rows)
    return pack_documents(documents, length, overlap=overlap)[0]  # without the report


def compile_training_graphs(conf: TrainConf, parallel: Parallel, folder: Path, *, decodes: bool) -> None:
    """Compile ahead of time every graph that train/distillation.py would; all processes see the temporary `folder`.

    `decodes` is False for a first stage, which is trained alone.
    """
    if not parallel.device.has_static_shapes:
        log.info("graphs: none to compile, because compiling is off on this device")
        return
    target = build_run_target(conf, parallel)
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed, on_host=parallel.builds_draft_on_host)
    has_prompts = conf.evaluation.prompts is not None or conf.data.source is DataSource.demo
    if conf.data.source is not DataSource.captured and has_prompts:
        rows = draw_rows(conf.optim.rows_per_step, conf.data.row_length, target.vocab_size, overlap=conf.data.overlap)
        store = None
    else:  # some graphs depend on the lengths of the held-out prompts
        data = load_training_rows(conf, target, draft, parallel)
        rows, store = data.rows, data.store
        if parallel.is_main:
            write_held_out(data.held_out, folder)
    choose_vocabulary(draft, target, rows, folder=None)
    state = RunState(folder, flatten_config(conf))
    Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=rows,
        store=store,
        run_state=state,
        metric_logger=MetricLogger(TrackerConf(), state, parallel.accelerator),
        evaluate=lambda _: {},
    ).warmup()
    if not conf.measure or not decodes:
        return
    # Saved and loaded as at the end of a run: some methods merge their adapters into the
    # target when they are saved, and graphs depend on the modules.
    with full_params(draft, dtype=target.device.dtype):
        draft.save(folder / "checkpoint", target, writes=parallel.is_main)
    parallel.barrier()
    if parallel.decodes:
        draft_under_test = load_draft_under_test(folder / "checkpoint", target)
        evaluation = resolve_evaluation(conf, folder)
        compile_eval_graphs(target, [draft_under_test], tree=conf.tree, conf=evaluation)


def warm_up_run(conf: TrainConf, parallel: Parallel) -> None:
    """Compile the graphs of a checked run in a temporary folder, which is on the file system of runs: all see that."""

    def open_folder(stack: ExitStack) -> str:
        prepare_folder(Path(conf.output_dir))
        return stack.enter_context(tempfile.TemporaryDirectory(dir=conf.output_dir))

    for stage in filter(None, [conf.first_stage(), conf]):
        with ExitStack() as stack:
            folder = parallel.run_on_main(partial(open_folder, stack))
            compile_training_graphs(stage, parallel, Path(folder), decodes=stage is conf)
            parallel.barrier()  # the main process removes what the others read
    parallel.end()
