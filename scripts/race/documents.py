"""Write documents in the layout that speculators trains on, and read its checkpoints.

A folder of documents has a data set of token ids, masks and lengths for each mask, `answers` (their tokens are learned)
and `all` (the prompts' too), and a file per document with the captured layers and the last hidden state before the
final norm.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.packing.documents import Packed
from models.drafts.base import Draft
from models.drafts.eagle3 import NORM_SWITCHES, Eagle3Draft
from models.drafts.options import Eagle3Conf
from models.drafts.registry import build_draft
from models.io.files import write_text_atomically
from models.losses.config import LossConf
from models.targets.target import Target

SUMMARY = "summary.json"  # the captured layers, the lengths and the tokens of a step; written last
MASKS = ANSWERS, ALL = ("answers", "all")
STATES = "hidden_states"
VOCABULARY = ("d2t", "t2d")  # tensors of a draft vocabulary, beside the documents as NAME.npy


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document of a packed row; tokens of its context are learned in the piece before."""

    ids: Tensor
    is_answer: Tensor
    is_context: Tensor

    def loss_mask(self, name: str) -> list[int]:
        """Return the mask of MASKS as the peer reads it: the entry of token t is for its prediction of token t+1.

        `answers` has answer tokens, as its own preparation has them; `all` has what `loss.on_prompts=true` learns.
        """
        if name == ANSWERS:
            return (self.is_answer & ~self.is_context).int().tolist()
        return [*(~self.is_context[1:]).int().tolist(), 0]


def split_documents(rows: Packed) -> list[Document]:
    """Return every document of the packed rows."""
    documents = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        context_mask = torch.zeros_like(batch.answer_mask) if batch.context_mask is None else batch.context_mask
        for document in batch.document_ids[0].unique().tolist():
            if document >= 0:
                part = batch.document_ids[0] == document
                ids, is_answer, is_context = (x[0][part] for x in (batch.input_ids, batch.answer_mask, context_mask))
                documents.append(Document(ids=ids, is_answer=is_answer, is_context=is_context))
    return documents


def write_documents(
    documents: list[Document], folder: Path, *, target: Target, layers: list[int], step_tokens: int
) -> None:
    """Write the documents with each mask, and with what enters `layers` and the final norm of the target."""
    (folder / STATES).mkdir(parents=True, exist_ok=True)
    for number, document in enumerate(documents):
        tensors = {"hidden_states": capture_states(target, document.ids, layers), "token_ids": document.ids}
        save_file(tensors, folder / STATES / f"hs_{number}.safetensors")
    lengths = [len(document.ids) for document in documents]
    for name in MASKS:
        columns = {
            "input_ids": [document.ids.tolist() for document in documents],
            "loss_mask": [document.loss_mask(name) for document in documents],
            "seq_len": lengths,
        }
        Dataset.from_dict(columns).with_format("torch").save_to_disk(folder / name)
        link = folder / name / STATES
        link.unlink(missing_ok=True)  # a stopped race may have left it
        link.symlink_to(Path("..") / STATES)
    summary = {"layers": layers, "lengths": lengths, "step_tokens": step_tokens}
    write_text_atomically(folder / SUMMARY, json.dumps(summary))


def write_vocabulary(draft: Draft, folder: Path) -> None:
    """Write a reduced vocabulary as the peer reads it, which is how drafts have it in their checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in VOCABULARY:
        if draft.kept_ids is not None:
            np.save(folder / f"{name}.npy", draft.state_dict()[name].numpy())


def read_documents(folder: Path) -> list[list[int]]:
    """Return the token ids of all documents of a folder."""
    return load_from_disk(str(folder / ALL)).with_format(None)["input_ids"][:]


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
    """Return the draft of a checkpoint of speculators."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    layer, d2t = config["transformer_layer_config"], tensors.get("d2t")
    conf = Eagle3Conf(
        layers=config["eagle_aux_hidden_state_layer_ids"],
        intermediate_size=layer["intermediate_size"],
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_size=layer["head_dim"],
        vocab_size=None if d2t is None else len(d2t),
        **{name: bool(config.get(name)) for name in NORM_SWITCHES},
    )
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    assert isinstance(draft, Eagle3Draft)
    if d2t is not None:
        draft.set_vocabulary(torch.arange(len(d2t)) + d2t, target)
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    mapped = {name: named[name] for name in draft.checkpoint_tensors()}
    draft.load_state_dict(mapped, strict=False)
    return draft.eval()
