"""A target trained with NxD is read from its ranks' files as if it were a plain checkpoint."""

import sys
from types import ModuleType

import pytest
import torch

from models.device.xla.nxd_checkpoint import find_rank_files, merge_shares, read_rank_shard
from models.io.errors import UserError
from models.parallel.tensor_parallel import plan_shards
from models.targets.config import TargetConf
from models.targets.loading import load_target
from tests.support.models.parallel_layers import shard_state_dict
from tests.support.models.sharded import CUT, RANKS, build_model
from tests.support.models.tiny import CPU, tiny_tokenizer

FILE = "dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"


def assert_same(tensors, model):
    torch.testing.assert_close(dict(tensors), dict(model.state_dict()), atol=0, rtol=0)


def cut_into_shares(model, ranks):
    full = model.state_dict()
    return [shard_state_dict(full, plan_shards(model, ranks), ranks=ranks, rank=rank) for rank in range(ranks)]


def save_shares(folder, shares, *, tag="step_10"):
    rank_files = folder / tag / "model"
    rank_files.mkdir(parents=True)
    for rank, share in enumerate(shares):
        torch.save(share, rank_files / FILE.format(rank))
    (folder / tag / "done").write_text("1")
    return rank_files


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CUT)
def test_shares_that_a_plan_cuts_are_merged(name, ranks):
    model = build_model(CUT[name]())
    assert_same(merge_shares(cut_into_shares(model, ranks), model), model)


def test_a_target_is_built_from_the_newest_finished_checkpoint(tmp_path):
    model = build_model(CUT["qwen3"]())
    model.config.save_pretrained(tmp_path)
    tiny_tokenizer(64).save_pretrained(tmp_path)
    save_shares(tmp_path, cut_into_shares(model, 4))
    (save_shares(tmp_path, [{}], tag="step_20").parent / "done").unlink()  # killed while it was saved
    assert_same(load_target(TargetConf(path=str(tmp_path)), CPU).model.state_dict(), model)


def fuse_layers(share, heads):
    """Fuse and name the layers as NxD's own Llama does."""
    named = {}
    for name, tensor in share.items():
        if "up_proj" in name:
            continue
        if "gate_proj" in name:
            tensor = torch.cat([tensor, share[name.replace("gate", "up")]])
        name = name.replace("gate_proj", "gate_up_proj")
        for part in "qkv":
            name = name.replace(f".{part}_proj.weight", f".qkv_proj.weight_{part}")
            name = name.replace(f".{part}_proj.bias", f".qkv_proj.bias_{part}")
        named[name] = tensor
    return named | {"model.rotary_emb.inv_freq": torch.ones(heads)}


def test_reordered_heads_and_fused_layers_are_put_in_order():
    """On Trn1, NxD repeats the row of key-value heads; query heads 0, 2, 1, 3 meet keys 0, 1, 0, 1."""
    model = build_model(CUT["llama"]())
    ranks, heads, kv_heads, size = 8, 8, 2, 16
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight query heads, of which four belong to a key's
    rows = torch.tensor([size * head + i for head in order for i in range(size)])
    shares = cut_into_shares(model, ranks)
    for name, full in model.state_dict().items():
        if ".q_proj." in name:
            full = full[rows]
        elif name.endswith("o_proj.weight"):
            full = full[:, rows]
        elif ".k_proj." in name or ".v_proj." in name:
            full = torch.cat([full] * (ranks // kv_heads))
        else:
            continue
        axis = 1 if name.endswith("o_proj.weight") else 0
        for share, part in zip(shares, full.chunk(ranks, axis), strict=True):
            share[name] = part
    assert_same(merge_shares([fuse_layers(share, heads) for share in shares], model), model)


def test_tensors_in_separate_files_are_read(tmp_path, monkeypatch):
    """torch_xla.utils.serialization writes references, and a file for each tensor."""
    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    reference = type("TensorReference", (), {"__module__": "torch_xla.utils.serialization"})
    sys.modules["torch_xla.utils.serialization"].TensorReference = reference
    first, second = reference(), reference()
    first.tid, second.tid = 0, 1
    rank_files = save_shares(tmp_path, [{"a.weight": first, "b.weight": second}])
    own = rank_files / (FILE.format(0) + ".tensors")
    own.mkdir()
    for number in range(2):
        torch.save(torch.full((2,), number), own / f"tensor_{number}.pt")
    (file,) = find_rank_files(tmp_path)
    assert {name: tensor.tolist() for name, tensor in read_rank_shard(file).items()} == {
        "a.weight": [0, 0],
        "b.weight": [1, 1],
    }


def test_files_of_the_older_layout_are_read(tmp_path):
    for rank in range(2):
        folder = tmp_path / f"tp_rank_{rank:02d}_pp_rank_00"
        folder.mkdir()
        torch.save({"model": {"rank": torch.tensor(rank)}}, folder / "checkpoint.pt")
    assert [int(read_rank_shard(file)["rank"]) for file in find_rank_files(tmp_path)] == [0, 1]


def test_a_folder_without_a_checkpoint_has_no_rank_files(tmp_path):
    assert find_rank_files(tmp_path) == []


def test_incomplete_and_foreign_checkpoints_are_refused(tmp_path):
    model = build_model(CUT["llama"]())
    shares = cut_into_shares(model, 4)
    rank_files = save_shares(tmp_path, shares)
    (rank_files / FILE.format(2)).unlink()
    with pytest.raises(UserError, match=r"all tensor ranks must be present, got \[0, 1, 3\]"):
        find_rank_files(tmp_path)
    (rank_files / "dp_rank_00_tp_rank_02_pp_rank_01.pt").write_text("")
    with pytest.raises(UserError, match=r"one pipeline stage and no expert ranks.*converter"):
        find_rank_files(tmp_path)
    with pytest.raises(UserError, match=r"embed_tokens.weight must be \[64, 64\] when merged, got \[48"):
        merge_shares(shares[:3], model)
    other = [share | {"model.layers.0.self_attn.k_norm.weight": torch.ones(16)} for share in shares]
    with pytest.raises(UserError, match=r"unknown tensor model.layers.0.self_attn.k_norm.weight"):
        merge_shares(other, model)
    del shares[0]["model.norm.weight"]
    with pytest.raises(UserError, match=r"got no model.norm.weight"):
        merge_shares(shares, model)
