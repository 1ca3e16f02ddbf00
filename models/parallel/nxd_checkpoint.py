"""Checkpoints of NxD as a source: the shares of all tensor ranks, merged to whole weights.

A model that was trained with NxD lies in a file a rank; beside it, the model's own config.json and
tokenizer are expected. `save_checkpoint(DIR, TAG, model=...)` writes

    DIR/TAG/model/dp_rank_00_tp_rank_00_pp_rank_00.pt     weights, or references to
    DIR/TAG/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt ...
    DIR/TAG/done

and `parallel_layers.save(..., DIR)` writes DIR/tp_rank_00_pp_rank_00/checkpoint.pt. Names are those
of Hugging Face, but NxD's own models fuse some layers, each rank's parts side by side:

    gate_up_proj                    gate_proj, up_proj
    qkv_proj                        q_proj, k_proj, v_proj   (as many key-value heads)
    qkv_proj.weight_q, _k, _v       q_proj, k_proj, v_proj   (grouped heads)

Where ranks outnumber key-value heads, each head is there several times, in one of two orders that
the keys themselves tell apart: neighbours hold the same head, or the whole row of heads repeats. In
the second, query heads stand in another order than the model's, so that each meets its key.

    heads k0 k1, queries q0 .. q3, 4 ranks      k0 k0 k1 k1 | q0 q1 q2 q3
                                                k0 k1 k0 k1 | q0 q2 q1 q3
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from models.errors import UserError
from models.parallel.tensor_parallel import IN, OUT, plan

FILE = re.compile(r"(?:dp_rank_\d+_)?(?:ep_rank_(\d+)_)?tp_rank_(\d+)_pp_rank_(\d+)(?:\.pt)?")
FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
RENAMED = re.compile(r"qkv_proj\.(weight|bias)_([qkv])$")
Weights = Mapping[str, Shaped[Tensor, "..."]]


def files(folder: Path) -> list[Path]:
    """The file of each tensor rank, in order; none where the folder is no NxD checkpoint."""
    finished = sorted(folder.glob("*/done"), key=lambda done: done.stat().st_mtime)
    places = [folder, folder / "model", *(done.parent / "model" for done in finished[-1:])]
    for place in places:
        found = {match: path for path in place.glob("*") if (match := FILE.fullmatch(path.name))}
        if found:
            return _in_order(folder, found)
    return []


def _in_order(folder: Path, found: Mapping[re.Match, Path]) -> list[Path]:
    if any(int(match[1] or 0) or int(match[3]) for match in found):
        raise UserError(
            "target.path: an NxD checkpoint must have one pipeline stage and no expert ranks, got "
            f"{str(folder)!r}; merge it with NxD's checkpoint_converter.py and give the result"
        )
    ranks = {int(match[2]): path for match, path in found.items()}
    if sorted(ranks) != list(range(len(ranks))):
        raise UserError(
            f"target.path: the files of all tensor ranks must be there, got {sorted(ranks)} of "
            f"{str(folder)!r}; copy the missing ones"
        )
    paths = [ranks[rank] for rank in range(len(ranks))]
    return [path / "checkpoint.pt" if path.is_dir() else path for path in paths]


class _Reference:
    """Stands for the class of references to tensors in files of their own: `tid` is its number."""

    tid: int


def read(file: Path) -> Weights:
    """The share of one rank. Nothing but tensors, numbers and references is unpickled."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    references: list[Any] = [
        (_Reference, name) for name in unknown if name.endswith(".TensorReference")
    ]
    with torch.serialization.safe_globals(references):
        share = torch.load(file, map_location="cpu", weights_only=True)
    share = share.get("model", share)

    def tensor(value: Any) -> Tensor:
        if not isinstance(value, _Reference):
            return value
        own = Path(f"{file}.tensors") / f"tensor_{value.tid}.pt"
        return torch.load(own, map_location="cpu", weights_only=True)

    return {name: tensor(value) for name, value in share.items()}


def merge(shares: Sequence[Weights], model: Any) -> dict[str, Shaped[Tensor, "..."]]:
    """Whole weights of `model`, which may lie on `meta`, from the shares of all ranks in order."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    shares = [_unfused(share, shapes) for share in shares]
    _check_names(set(shares[0]), set(shapes), model.config.get_text_config())
    parts, joined = plan(model, 1), {}
    for name, tensor in shares[0].items():
        layer, _, parameter = name.rpartition(".")
        axis = parts[layer].axis(parameter) if layer in parts else None
        joined[name] = tensor
        if axis is not None and tensor.shape != shapes[name]:
            joined[name] = torch.cat([share[name] for share in shares], axis)
    for name in list(joined):
        if name.endswith(".k_proj.weight"):
            _single_heads(joined, name.removesuffix(".k_proj.weight"), model, shapes)
    for name, tensor in joined.items():
        if tensor.shape != shapes[name]:
            raise UserError(
                f"target.path: {name} must be {list(shapes[name])} when merged, got "
                f"{list(tensor.shape)}; give the config of the model that was trained"
            )
    return joined


def _check_names(found: set[str], known: set[str], config: Any) -> None:
    missing, unknown = known - found, found - known
    if config.tie_word_embeddings:
        missing -= {"lm_head.weight"}
    if missing or unknown:
        got = f"no {min(missing)}" if missing else f"the unknown {min(unknown)}"
        raise UserError(
            "target.path: an NxD checkpoint must have the tensors of the config.json beside it, "
            f"got {got}; give the config of the model that was trained"
        )


def _unfused(share: Weights, known: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same under the names of Hugging Face."""
    named = {}
    for name, tensor in share.items():
        *above, layer, parameter = name.split(".")
        if name not in known and layer in FUSED and parameter in ("weight", "bias"):
            parts = [".".join([*above, part, parameter]) for part in FUSED[layer]]
            named |= zip(parts, tensor.chunk(len(parts), OUT), strict=True)
        elif layer != "rotary_emb":  # which is made of the config
            named[RENAMED.sub(r"\2_proj.\1", name)] = tensor
    return named


def _single_heads(
    joined: dict[str, Tensor], attention: str, model: Any, shapes: Mapping[str, Any]
) -> None:
    """Keep one of each key-value head, and put query heads in the order of the model."""
    keys = joined[f"{attention}.k_proj.weight"]
    repeats, left = divmod(len(keys), shapes[f"{attention}.k_proj.weight"][0])
    if repeats <= 1 or left:
        return
    heads = model.config.get_text_config().num_key_value_heads
    by_neighbour, by_row = keys.unflatten(0, (heads, repeats, -1)), keys.unflatten(0, (repeats, -1))
    rows = not torch.equal(by_neighbour, by_neighbour[:, :1].expand_as(by_neighbour))
    if rows and not torch.equal(by_row, by_row[:1].expand_as(by_row)):
        raise UserError(
            f"target.path: heads that are held {repeats} times must be equal, got others in "
            f"{attention}.k_proj; merge it with NxD's checkpoint_converter.py and give the result"
        )
    for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        if (tensor := joined.get(f"{attention}.{name}")) is not None:
            several = tensor.unflatten(0, (repeats, heads, -1) if rows else (heads, repeats, -1))
            joined[f"{attention}.{name}"] = several.select(0 if rows else 1, 0).flatten(0, 1)
    for name, axis in (("q_proj.weight", OUT), ("q_proj.bias", OUT), ("o_proj.weight", IN)):
        if rows and (tensor := joined.get(f"{attention}.{name}")) is not None:
            stood = tensor.unflatten(axis, (repeats, heads, -1)).transpose(axis, axis + 1)
            joined[f"{attention}.{name}"] = stood.flatten(axis, axis + 2)


def load(found: Sequence[Path], model: Any, **kwargs: Any) -> Any:
    """The whole model of an NxD checkpoint, given the model without weights."""
    merged = merge([read(file) for file in found], model)
    return type(model).from_pretrained(None, config=model.config, state_dict=merged, **kwargs)
