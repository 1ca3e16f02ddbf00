"""Run several processes, a run after the other: parallel_run.py TARGET RUNS, RUNS in JSON.

A run is the arguments of `run` below; each process writes its final state to FOLDER/rank-N.json.
"""

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from data.config import DataConf, OnPolicyConf
from infer.config import EvaluationConf
from models.batch import Batch
from models.checkpoints.fingerprints import hash_tensors
from models.device.opening import open_device
from models.drafts.options import CausalLMConf, Eagle1Conf, Eagle3Conf, HydraConf, InitFrom, MedusaConf
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.parallel.dtensor import full_params, full_tensor
from models.parallel.processes import leave_processes
from models.targets.config import TargetConf
from models.targets.language_model import TargetOutput
from tests.support.models.tiny import chain, tiny_tokenizer
from tests.support.runs.toy_run import VOCAB, build_toy_model, toy_conf, toy_rows
from train.config.optim import OptimName
from train.config.run import ParallelConf, Weights
from train.distributed.build import build_parallel
from train.distributed.parallel import Parallel
from train.quick_eval import build_quick_eval
from train.run.log import MetricLogger
from train.run.state import RunState, flatten_config
from train.trainer import Trainer

DRAFTS = {
    "eagle3": Eagle3Conf(layers=[0, 1, 2], ttt_steps=2),
    "eagle1": Eagle1Conf(feature_noise=0.0),
    "medusa": MedusaConf(heads=2),
    "hydra": HydraConf(heads=2),
    "pruned": CausalLMConf(init_from=InitFrom.pruned, layers=[0, 3]),
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def save_target(folder: Path, *, tied: bool = False, **changes: int) -> None:
    """Save a target of four attention heads over two key-value heads, which two processes can share, or changed."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = build_toy_model(**shape | changes, tie_word_embeddings=tied, initializer_range=0.2)
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)


class Stopped(Exception):  # noqa: N818  # it is not an error
    pass


def read_refusal(spread: Parallel) -> str:
    """Return the error of the main process, as this one meets it."""

    def refuse() -> None:
        raise UserError(f"refused by process {spread.accelerator.process_index}")

    try:
        spread.run_on_main(refuse)
    except UserError as error:
        return str(error)
    return "nothing was refused"


def run(
    target: Path,
    *,
    folder: str,
    parallel: dict[str, Any],
    draft: str = "eagle3",
    drafted_share: float = 0.0,
    after: str | None = None,
    stop: int | None = None,
    counts_products: bool = False,
    **optim: Any,
) -> None:
    """Train from the state of the run `after` on, up to the state of step `stop`.

    `drafted_share`: of rows whose answers the draft writes; the features of the others are kept in memory.
    `counts_products`: count the operations of matrix products of the draft and the losses. They then read all tokens.
    """
    torch.set_num_threads(1)
    if "name" in optim:
        optim["name"] = OptimName(optim["name"])
    layout = {k: Weights(v) if isinstance(v, str) else v for k, v in parallel.items()}
    conf = toy_conf(
        target=TargetConf(path=str(target)),
        draft=DRAFTS[draft],
        data=DataConf(seed=1, on_policy=OnPolicyConf(share=drafted_share, interval=2), keep_features=drafted_share > 0),
        parallel=ParallelConf(**layout),
        optim={"steps": 4, "rows_per_step": 8, "micro_batch_size": 1, **optim},
    )
    conf.interval.log = conf.interval.save = 1
    device = open_device(conf.device)
    spread = build_parallel(conf.parallel, device, trackers=[])
    run_dir = Path(folder)
    if spread.is_main and after is not None:
        shutil.copytree(after, run_dir, dirs_exist_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    spread.barrier()
    state = RunState(run_dir, flatten_config(conf))
    state.load_progress()
    own = spread.build_target(conf)
    learner = build_draft(conf.draft, own, loss=conf.loss, seed=conf.seed)
    loop = Trainer(
        conf=conf,
        parallel=spread,
        target=own,
        draft=learner,
        rows=toy_rows(),
        run_state=state,
        metric_logger=MetricLogger(conf.log, state, spread.accelerator),
        evaluate=build_quick_eval(own, PROMPTS, chain(2), EvaluationConf(max_new_tokens=6), batch=8),
    )
    save = state.save

    def stopping(*args: Any) -> None:
        save(*args)
        if state.progress.step == stop:
            raise Stopped

    state.save = stopping
    products = None
    with suppress(Stopped):
        if counts_products:
            products = count_draft_products(loop)
        else:
            loop.run()
    ids = torch.tensor(PROMPTS[:1])
    logits = own.model(input_ids=ids).logits
    with full_params(learner):
        weights = hash_tensors({name: p for name, p in learner.named_parameters() if p.requires_grad})
    left = {
        "heard": any(spread.gather(spread.accelerator.process_index == 1)),
        "main": spread.run_on_main(lambda: spread.accelerator.process_index),
        "refused": read_refusal(spread),
        "fingerprint": own.fingerprint,
        "draft": weights,
        "products": products,
        "draft_held": count_held(learner),
        "target_held": count_held(own.model),
        "logits": full_tensor(logits).flatten().tolist(),
        "progress": asdict(state.progress),
    }
    (run_dir / f"rank-{spread.accelerator.process_index}.json").write_text(json.dumps(left))


def count_draft_products(loop: Trainer) -> int:
    """Run the loop; return the operations of its matrix products, without those of the target's passes."""
    compute_features, of_target = loop.features.compute_features, FlopCounterMode(display=False)

    def counted(batch: Batch) -> TargetOutput:
        with of_target:
            return compute_features(batch)

    loop.features.compute_features = counted
    loop.target.head.joins_ranks = True  # else a single process would leave prompts out
    loop.evaluate = lambda _: {"delivered_per_round": 1.0}  # decoding is not counted
    with FlopCounterMode(display=False) as of_all:
        loop.run()
    return of_all.get_total_flops() - of_target.get_total_flops()


def count_held(module: nn.Module) -> int:
    """Count the numbers of the weights that this process holds."""
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[2]):
        run(Path(sys.argv[1]), **arguments)
    leave_processes()
