"""Compile everything that a training run and its evaluation will need, before the run.

python -m train.warmup draft=NAME ...       what `python -m train` takes

One step, on dummy rows unless the run holds prompts out of its data, then what the evaluation at
the end needs; each graph is printed with its time. Graphs last as long as the compiler's cache does
(docs/graphs.md). No run folder is written.
"""

import logging
import tempfile
from pathlib import Path

import torch

from conf.entry import entry_point
from data.packing.documents import Documents, Packed
from data.packing.pack import pack
from data.sources.tokenized import from_pair
from infer.candidates import candidate
from infer.warmup import warm
from models.console import speak
from models.drafts.base import Draft
from models.target.target import Target
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.log import Log, LogConf
from train.loop import Loop
from train.rows import feature_store
from train.rows.draft_vocabulary import choose_vocabulary
from train.rows.held_out import judged_on, judges_elsewhere, keep
from train.rows.packed_rows import training_rows
from train.state import State, flat

log = logging.getLogger("train.warmup")


def dummy_rows(conf: TrainConf, vocab: int) -> Packed:
    """One step's rows of random tokens, the first half of each a prompt."""
    length, half = conf.data.length, conf.data.length // 2
    numbers = torch.Generator().manual_seed(conf.seed)
    texts = torch.randint(vocab, (conf.optim.rows, length), generator=numbers).tolist()
    documents = Documents.of(from_pair(ids[:half], ids[half:]) for ids in texts)
    return pack(documents, length, overlap=conf.data.overlap)[0]


def compile_all(conf: TrainConf, parallel: Parallel, folder: Path) -> None:
    """What train/__main__.py would, in a folder that is thrown away."""
    device = parallel.device
    if not device.static:
        log.info("graphs: nothing is compiled here")
        return
    target = parallel.target(conf.target)
    draft = conf.draft.build(target, loss=conf.loss, seed=conf.seed)
    store = feature_store.opened(conf.data, target, draft, parallel)
    if store is None and judges_elsewhere(conf):
        rows = dummy_rows(conf, target.vocab_size)
    else:  # the lengths of the prompts that are held out of the data decide on graphs
        rows, held = training_rows(conf, target, parallel, store)
        keep(held, folder)
    choose_vocabulary(draft, target, rows, conf.data, folder=None)
    state = State(folder, flat(conf))
    Loop(
        conf=conf, parallel=parallel, device=device, target=target, draft=draft, rows=rows,
        store=store, state=state, log=Log(LogConf(), state, parallel.accelerator),
        evaluate=lambda _: {},
    ).rehearse(log.info)  # fmt: skip
    with parallel.whole(draft):
        if parallel.runs_target:
            _compile_evaluation(conf, target, draft, folder)


def _compile_evaluation(conf: TrainConf, target: Target, draft: Draft, folder: Path) -> None:
    draft.eval().save(folder / "checkpoint", target)
    best = candidate(folder / "checkpoint", target)
    warm(target, [best], tree=conf.tree, conf=judged_on(conf, folder), say=log.info)


@entry_point("train_warmup", TrainConf)
def main(conf: TrainConf) -> None:
    speak()
    conf.check(reads_data=False)
    parallel = conf.processes(trackers=[])
    with tempfile.TemporaryDirectory() as folder:
        compile_all(conf, parallel, Path(folder))
    parallel.wait()
    parallel.accelerator.end_training()


if __name__ == "__main__":
    main()
