"""Import of NxD checkpoints: the shares of all tensor ranks, merged to full weights; see docs/nxd.md.

`save_checkpoint(DIR, TAG, model=...)` of NxD writes

    DIR/TAG/model/dp_rank_00_tp_rank_00_pp_rank_00.pt     weights, or references to
    DIR/TAG/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt ...
    DIR/TAG/done

and `parallel_layers.save(..., DIR)` writes DIR/tp_rank_00_pp_rank_00/checkpoint.pt. Some layers are
fused, and their parts concatenated in each rank: FUSED_LAYERS, or `qkv_proj.weight_q`, _k and _v with
fewer key-value heads than query heads. With more ranks than key-value heads, neighbors hold the same
head, or the sequence of all heads repeats and query heads follow their keys:

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

from models.io.errors import UserError, require
from models.parallel.tensor_parallel import INPUT_AXIS, OUTPUT_AXIS, plan_shards

RANK_FILE = re.compile(r"(?:dp_rank_\d+_)?(?:ep_rank_(\d+)_)?tp_rank_(\d+)_pp_rank_(\d+)(?:\.pt)?")
FUSED_LAYERS = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
GROUPED_QKV = re.compile(r"qkv_proj\.(weight|bias)_([qkv])$")
QUERY_AXES = {"q_proj.weight": OUTPUT_AXIS, "q_proj.bias": OUTPUT_AXIS, "o_proj.weight": INPUT_AXIS}
StateDict = Mapping[str, Shaped[Tensor, "..."]]


def find_rank_files(folder: Path) -> list[Path]:
    """Return the file of each tensor rank, in order; no files if it is not an NxD checkpoint."""
    finished = sorted(folder.glob("*/done"), key=lambda done: done.stat().st_mtime)
    folders = [folder, folder / "model", *(done.parent / "model" for done in finished[-1:])]
    for candidate in folders:
        rank_files = {match: path for path in candidate.glob("*") if (match := RANK_FILE.fullmatch(path.name))}
        if rank_files:
            return _order_by_rank(folder, rank_files)
    return []


def _order_by_rank(folder: Path, rank_files: Mapping[re.Match, Path]) -> list[Path]:
    require(
        not any(int(match[1] or 0) or int(match[3]) for match in rank_files),
        "target.path: an NxD checkpoint must have one pipeline stage and no expert ranks, got "
        f"{str(folder)!r}; merge it with NxD's checkpoint_converter.py and give the result",
    )
    ranks = {int(match[2]): path for match, path in rank_files.items()}
    require(
        sorted(ranks) == list(range(len(ranks))),
        f"target.path: the files of all tensor ranks must be present, got {sorted(ranks)} of "
        f"{str(folder)!r}; copy the missing ones",
    )
    return [path / "checkpoint.pt" if path.is_dir() else path for _, path in sorted(ranks.items())]


class _TensorReference:
    """A stand-in for NxD's references to tensors in separate files, which `tid` numbers."""

    tid: int


def read_rank_shard(file: Path) -> StateDict:
    """Return the shard of one rank; unpickle only plain data, tensors and tensor references."""
    unsafe_globals = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    allowed_globals: list[Any] = [
        (_TensorReference, name) for name in unsafe_globals if name.endswith(".TensorReference")
    ]
    with torch.serialization.safe_globals(allowed_globals):
        shard = torch.load(file, map_location="cpu", weights_only=True)
    tensors = Path(f"{file}.tensors")
    return {
        name: torch.load(tensors / f"tensor_{value.tid}.pt", map_location="cpu", weights_only=True)
        if isinstance(value, _TensorReference)
        else value
        for name, value in shard.get("model", shard).items()
    }


def merge_shares(shares: Sequence[StateDict], model: Any) -> dict[str, Shaped[Tensor, "..."]]:
    """Return the weights of `model`, merged from the shares of all ranks in order.

    `model` may be on `meta`. Raise UserError if the shares are not those of such a model.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    shares = [_split_fused(share, shapes) for share in shares]
    _check_names(set(shares[0]), set(shapes), model.config.get_text_config())
    weights, shards = dict(shares[0]), plan_shards(model, 1)
    for name, tensor in weights.items():
        layer, _, parameter = name.rpartition(".")
        axis = shards[layer].axis_of(parameter) if layer in shards else None
        if axis is not None and tensor.shape != shapes[name]:
            weights[name] = torch.cat([share[name] for share in shares], axis)
    for name in weights:
        if name.endswith(".k_proj.weight"):
            _merge_repeated_heads(weights, name.removesuffix(".k_proj.weight"), model, shapes)
    for name, tensor in weights.items():
        require(
            tensor.shape == shapes[name],
            f"target.path: {name} must be {list(shapes[name])} when merged, got "
            f"{list(tensor.shape)}; give the config of the model that was trained",
        )
    return weights


def _check_names(names: set[str], expected: set[str], config: Any) -> None:
    missing, unknown = expected - names, names - expected
    if config.tie_word_embeddings:
        missing -= {"lm_head.weight"}
    if missing or unknown:
        got = f"no {min(missing)}" if missing else f"the unknown tensor {min(unknown)}"
        raise UserError(
            "target.path: an NxD checkpoint must have the tensors of the config.json beside it, "
            f"got {got}; give the config of the model that was trained"
        )


def _split_fused(share: StateDict, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the share with fused layers split and all tensors under Hugging Face's names."""
    renamed = {}
    for name, tensor in share.items():
        *path, layer, parameter = name.split(".")
        if name not in expected and layer in FUSED_LAYERS and parameter in ("weight", "bias"):
            parts = [".".join([*path, part, parameter]) for part in FUSED_LAYERS[layer]]
            renamed |= zip(parts, tensor.chunk(len(parts), OUTPUT_AXIS), strict=True)
        elif layer != "rotary_emb":  # rotary embeddings are computed from the config
            renamed[GROUPED_QKV.sub(r"\2_proj.\1", name)] = tensor
    return renamed


def _merge_repeated_heads(weights: dict[str, Tensor], attention: str, model: Any, shapes: Mapping[str, Any]) -> None:
    """Change `weights`: one copy of each key-value head, query heads in the order of the model."""
    keys = weights[f"{attention}.k_proj.weight"]
    repeats, remainder = divmod(len(keys), shapes[f"{attention}.k_proj.weight"][0])
    if repeats <= 1 or remainder:
        return
    heads = model.config.get_text_config().num_key_value_heads
    for split, copies_axis in (((heads, repeats, -1), 1), ((repeats, heads, -1), 0)):
        copies = keys.unflatten(0, split)
        if torch.equal(copies, copies.narrow(copies_axis, 0, 1).expand_as(copies)):
            break
    else:
        raise UserError(
            f"target.path: the {repeats} copies of a head must be equal, got different ones in "
            f"{attention}.k_proj; merge it with NxD's checkpoint_converter.py and give the result"
        )
    for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        if (tensor := weights.get(f"{attention}.{name}")) is not None:
            single = tensor.unflatten(0, split).select(copies_axis, 0)
            weights[f"{attention}.{name}"] = single.flatten(0, 1)
    for name, axis in QUERY_AXES.items():
        # Only if the sequence of all heads repeats, query heads have an order of their own.
        if copies_axis == 0 and (tensor := weights.get(f"{attention}.{name}")) is not None:
            reordered = tensor.unflatten(axis, (repeats, heads, -1)).transpose(axis, axis + 1)
            weights[f"{attention}.{name}"] = reordered.flatten(axis, axis + 2)


def load_rank_files(rank_files: Sequence[Path], model: Any, **kwargs: Any) -> Any:
    """Load the full model of an NxD checkpoint; `model` is the same without weights."""
    weights = merge_shares([read_rank_shard(file) for file in rank_files], model)
    return type(model).from_pretrained(None, config=model.config, state_dict=weights, **kwargs)
