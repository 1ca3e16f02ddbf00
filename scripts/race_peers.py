"""Let speculators train on the documents of a study run, and replay its draft beside ours.

    bash scripts/setup_speculators.sh
    python -m scripts.race_peers export outputs/peer/data --seed 0
    .venv-speculators/bin/python scripts/train_speculators.py --speculator-type eagle3 \\
        --verifier-name-or-path data/demo/target --data-path outputs/peer/data \\
        --save-path outputs/peer/run --total-seq-len 2048 --max-steps 400 --epochs 20 \\
        --checkpoint-freq 20 --lr 1e-2 --seed 0 --hidden-states-dtype float32 --num-workers 0 \\
        --draft-attn-impl sdpa --loss-implementation eager --on-missing raise \\
        --train-data-ratio 0.98
    python -m scripts.race_peers measure outputs/peer/run/19

Both trainers then see the same answers of the same target. The peer packs whole documents by itself
and holds 2 % of them out, which it has no switch for.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.entry import compose
from data.packing.documents import Packed
from infer.measure.replay import Replay, decoding_starts
from models.device import DeviceConf, DeviceName
from models.distill.losses import LossConf
from models.drafts.eagle3 import NORM_SWITCHES, Eagle3Conf, Eagle3Draft
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf, TreeKind
from models.target.target import Target, TargetConf
from scripts.study_eagle3 import BASE, DEPTH, collect_texts
from train.config import TrainConf
from train.rows.packed_rows import load_training_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write documents and hidden states")
    export.add_argument("folder", type=Path)
    export.add_argument("--seed", type=int, default=0)
    export.add_argument("--output", type=Path, default=Path("outputs/study"), help="of the study")
    measure = commands.add_parser("measure", help="replay a checkpoint of speculators")
    measure.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "export":
        export_documents(args)
    else:
        measure_peer(args.folder)


def export_documents(args: argparse.Namespace) -> None:
    """Write the documents that a study run of this seed trains on, in the layout of speculators.

    A document's file has the captured layers and the last hidden state before the final norm.
    """
    overrides = [f"seed={args.seed}", f"data.seed={args.seed}", f"output_dir={args.output}"]
    conf = compose("train", TrainConf, [*BASE, *overrides, "run_name=export"])
    parallel = conf.build_parallel(trackers=[])
    target = parallel.build_target(conf.target)
    draft = conf.draft.build(target, loss=conf.loss, seed=0)
    rows, _, _ = load_training_rows(conf, target, draft, parallel)
    documents = split_documents(rows)
    columns = {
        "input_ids": [ids.tolist() for ids, _ in documents],
        "loss_mask": [mask.int().tolist() for _, mask in documents],
        "seq_len": [len(ids) for ids, _ in documents],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(args.folder)
    (args.folder / "hidden_states").mkdir(exist_ok=True)
    for number, (ids, _) in enumerate(documents):
        states = run_target(target, ids, draft.needs.layers)
        file = args.folder / "hidden_states" / f"hs_{number}.safetensors"
        save_file({"hidden_states": states, "token_ids": ids}, file)
    print(f"{len(documents):,} documents, {sum(columns['seq_len']):,} tokens: {args.folder}")


def split_documents(rows: Packed) -> list[tuple[Tensor, Tensor]]:
    """Return the token ids and the answer mask of every document of the packed rows."""
    documents = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        for document in batch.document_ids[0].unique().tolist():
            if document >= 0:
                part = batch.document_ids[0] == document
                documents.append((batch.input_ids[0][part], batch.answer_mask[0][part]))
    return documents


@torch.no_grad()
def run_target(target: Target, ids: Tensor, layers: list[int]) -> Tensor:
    """Return what enters `layers` and the final norm, as [tokens, layers + 1, width]."""
    entered: list[Tensor] = []
    model: Any = target.model
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    output = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [output.hidden_states[layer] for layer in layers] + entered
    return torch.cat(states).transpose(0, 1).float().contiguous()


def load_peer(folder: Path, target: Target) -> Eagle3Draft:
    """Return the draft of a checkpoint of speculators with the target's vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    conf = Eagle3Conf(
        layers=config["eagle_aux_hidden_state_layer_ids"],
        intermediate_size=layer["intermediate_size"],
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_size=layer["head_dim"],
        **{name: bool(config.get(name)) for name in NORM_SWITCHES},
    )
    draft = conf.build(target, loss=LossConf(), seed=0)
    assert isinstance(draft, Eagle3Draft)
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    mapped = {name: named[name] for name in draft.checkpoint_tensors()}
    draft.load_state_dict(mapped, strict=False)
    return draft.eval()


def measure_peer(folder: Path) -> None:
    """Print the acceptance length of a chain and the shares of its rounds that got that deep."""
    target = TargetConf().build(DeviceConf(name=DeviceName.cpu, compile=False).build())
    draft = load_peer(folder, target)
    texts = collect_texts(target, draft.needs.layers)
    chain = TreeConf(kind=TreeKind.chain, depth=DEPTH).build()
    replay = Replay(target, draft, texts, sampling=SamplingConf())
    accepted = replay.accepted_lengths({"chain": chain})["chain"]
    counts = np.concatenate([lengths[decoding_starts(lengths)] for lengths in accepted])
    shares = " ".join(f"{(counts >= depth).mean():.2f}" for depth in range(1, DEPTH + 1))
    print(f"tau {1 + counts.mean():.2f}, accepted at 1-{DEPTH}: {shares}")


if __name__ == "__main__":
    main()
