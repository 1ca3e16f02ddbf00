"""Run a small draft and target, for tests of the loop; as a command: toy_run.py FOLDER CHANGES."""

import json
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import Qwen3Config, Qwen3ForCausalLM

from conf.entry import exit_with_error
from data.config import DataConf
from data.packing.documents import Packed
from models.batch import Batch
from models.checkpoints.saved_states import find_newest_state
from models.device.config import DeviceConf, DeviceName, Precision
from models.device.device import Device
from models.device.opening import open_device
from models.drafts.base import Draft, Extras, LossTerms, Needs
from models.drafts.options import DraftConf
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.io.lock import acquire_lock
from models.losses.config import LossConf, LossName
from models.parallel.processes import leave_processes
from models.targets.language_model import TargetOutput
from models.targets.loading import freeze_model
from models.targets.target import Target
from tests.support.data.packed import packed_of
from train.config.optim import OptimConf
from train.config.run import IntervalConf, TrainConf
from train.distributed.build import build_parallel
from train.run.folder import check_same_step, check_steps, report_full_disk
from train.run.log import MetricLogger
from train.run.state import RunProgress, RunState, flatten_config
from train.trainer import Trainer

VOCAB, WIDTH, LENGTH, ROWS = 32, 16, 12, 24


@dataclass(kw_only=True)
class ToyConf(DraftConf):
    """Options of a draft that predicts the next token from a captured layer and an embedding."""

    method: ClassVar[str] = "toy"
    draft_class: ClassVar[str] = "tests.support.runs.toy_run:ToyDraft"
    dropout: float = 0.1  # so that a run which draws other numbers ends in other weights


class ToyDraft(Draft):
    method = "toy"
    max_depth = trained_depth = 1

    def __init__(self, conf: ToyConf, target: Target):
        super().__init__()
        self.needs = Needs(layers=[1], hidden=False, context=True)
        self.embed = nn.Embedding(target.vocab_size, WIDTH)
        self.frozen = nn.Embedding(target.vocab_size, WIDTH).requires_grad_(False)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.dropout = conf.dropout
        self.lm_head = nn.Linear(WIDTH, target.vocab_size, bias=False)

    @classmethod
    def build(cls, conf: ToyConf, target: Target, *, loss: LossConf, seed: int) -> "ToyDraft":
        torch.manual_seed(seed)
        return cls(conf, target)

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        shape = (batch.input_ids.shape[1], WIDTH)
        drawn = np.stack([numbers.random(shape, dtype=np.float32) for numbers in generators])
        return {"mask": torch.from_numpy(drawn >= self.dropout) / (1 - self.dropout)}

    def loss_terms(self, batch: Batch, target_output: TargetOutput, mask: Tensor) -> LossTerms:
        both = torch.cat([self.embed(batch.input_ids), target_output.captured.float()], -1)
        mixed = self.norm((self.mix(both).tanh() * mask).float())
        logits = self.lm_head(mixed)[:, :-1]
        each = F.cross_entropy(logits.float().mT, batch.input_ids[:, 1:], reduction="none")
        counted = batch.answer_mask[:, 1:] & (batch.document_ids[:, 1:] == batch.document_ids[:, :-1])
        hits = (logits.argmax(-1) == batch.input_ids[:, 1:]) & counted
        weight = counted.sum().float()
        return LossTerms(
            total=(each * counted).sum(), weight=weight, metrics={"hit": torch.stack([hits.sum().float(), weight])}
        )

    def save(self, directory: Path, target: Target, *, writes: bool = True) -> None:
        directory.mkdir(exist_ok=True)
        save_file(self.state_dict(), directory / "model.safetensors")


def build_toy_model(**changes) -> Qwen3ForCausalLM:
    """Build a random model of two layers, or of the changed shape."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**shape | heads | changes))


def toy_target() -> Target:
    device = open_device(DeviceConf(name=DeviceName.cpu, compile=False))
    return freeze_model(build_toy_model(), None, name="toy", device=device)


def toy_rows() -> Packed:
    """Build counting sequences with answers of unequal lengths, which a split of a batch could weigh wrongly."""
    start = torch.arange(ROWS)[:, None] * 5
    ids = (start + torch.arange(LENGTH)) % VOCAB
    answer = torch.arange(LENGTH) >= 1 + torch.arange(ROWS)[:, None] % 9
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    return packed_of(Batch(input_ids=ids, answer_mask=answer, document_ids=positions // 6, positions=positions % 6))


def toy_conf(**changes) -> TrainConf:
    optim, interval = changes.pop("optim", {}), changes.pop("interval", {})
    base = TrainConf(
        draft=changes.pop("draft", None) or ToyConf(dropout=changes.pop("dropout", 0.1)),
        data=DataConf(seed=1),
        loss=LossConf(name=LossName.soft_ce),
        device=DeviceConf(name=DeviceName.cpu, precision=Precision.float32, compile=False),
        optim=OptimConf(**{"steps": 12, "rows_per_step": 4, "lr": 3e-3, "warmup_ratio": 0.1, **optim}),
        interval=IntervalConf(**{"log": 3, "eval": 4, "save": 2, **interval}),
        run_name="toy",
    )
    return replace(base, **changes)


def toy_run(
    folder: Path,
    conf: TrainConf,
    *,
    target: Target | None = None,
    interrupt_at: int | None = None,
    device: Device | None = None,
) -> tuple[Draft, RunProgress]:
    """Train with the parts of a run that the tests are about."""
    torch.set_num_threads(1)
    device = device or open_device(conf.device)
    parallel = build_parallel(conf.parallel, device, trackers=conf.log.list_trackers())
    folder.mkdir(parents=True, exist_ok=True)
    target = target or toy_target()
    state = RunState(folder, flatten_config(conf))
    state.load_progress()
    check_same_step(state, parallel)
    check_steps(state, conf.optim)
    if parallel.is_main:
        acquire_lock(folder)
        state.remove_old_states()
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    log = MetricLogger(conf.log, state, parallel.accelerator)
    loop = Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=toy_rows(),
        run_state=state,
        metric_logger=log,
        evaluate=toy_length,
    )
    if interrupt_at is not None:
        learn = loop._take_step

        def interrupted() -> None:
            if state.progress.step == interrupt_at:
                raise KeyboardInterrupt
            learn()

        loop._take_step = interrupted
    with report_full_disk(folder):
        return draft, loop.run()


def toy_length(draft: Draft) -> dict[str, float]:
    """Compute a figure of the weights instead of decoding; use random numbers as decoding does."""
    torch.rand(3)
    size = sum(float(p.detach().abs().mean()) for p in draft.parameters() if p.requires_grad)
    return {"delivered_per_round": size}


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def load_saved_tensors(state: Path, part: str = "weights") -> dict[str, Tensor]:
    """Load the tensors of a part of a state, without a module to load them into."""
    reader = dcp.FileSystemReader(state)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(f"{part}.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items()}


def weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights of the newest state."""
    newest = find_newest_state(folder)
    assert newest is not None
    return load_saved_tensors(newest)


if __name__ == "__main__":
    try:
        toy_run(Path(sys.argv[1]), toy_conf(**json.loads(sys.argv[2])))
        leave_processes()
    except UserError as error:
        exit_with_error(error)
