"""Write documents in the layout that speculators trains on, and read its checkpoints.

A folder of documents is a data set of token ids, answer masks and lengths, with a file per document
that has the captured layers and the last hidden state before the final norm.
"""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.packing.documents import Packed
from models.drafts.eagle3 import NORM_SWITCHES, Eagle3Draft
from models.drafts.options import Eagle3Conf
from models.drafts.registry import build_draft
from models.io.files import write_text_atomically
from models.losses.config import LossConf
from models.targets.target import Target

SUMMARY = "summary.json"  # the captured layers and the lengths; written last
Document = tuple[Tensor, Tensor]  # token ids and answer mask


def split_documents(rows: Packed) -> list[Document]:
    """Return every document of the packed rows."""
    documents = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        for document in batch.document_ids[0].unique().tolist():
            if document >= 0:
                part = batch.document_ids[0] == document
                documents.append((batch.input_ids[0][part], batch.answer_mask[0][part]))
    return documents


def write_documents(documents: list[Document], folder: Path, *, target: Target, layers: list[int]) -> None:
    """Write the documents with what enters `layers` and the final norm of the target."""
    columns = {
        "input_ids": [ids.tolist() for ids, _ in documents],
        "loss_mask": [mask.int().tolist() for _, mask in documents],
        "seq_len": [len(ids) for ids, _ in documents],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    states = folder / "hidden_states"
    states.mkdir(exist_ok=True)
    for number, (ids, _) in enumerate(documents):
        tensors = {"hidden_states": capture_states(target, ids, layers), "token_ids": ids}
        save_file(tensors, states / f"hs_{number}.safetensors")
    summary = {"layers": layers, "lengths": columns["seq_len"]}
    write_text_atomically(folder / SUMMARY, json.dumps(summary))


@torch.no_grad()
def capture_states(target: Target, ids: Tensor, layers: list[int]) -> Tensor:
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
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    assert isinstance(draft, Eagle3Draft)
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    mapped = {name: named[name] for name in draft.checkpoint_tensors()}
    draft.load_state_dict(mapped, strict=False)
    return draft.eval()
