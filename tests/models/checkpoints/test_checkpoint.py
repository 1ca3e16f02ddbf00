"""Checkpoints are complete or absent, read strictly, and tied to their target and tokenizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoints import checkpoint, checkpoint_files
from models.io import files
from models.io.errors import UserError

TENSORS = {"fc.weight": torch.arange(6.0).view(2, 3), "d2t": torch.tensor([0, 2])}
CONFIG = {"model_type": "llama", "draft_vocab_size": 2}
HASHES = {checkpoint_files.TARGET_HASH_KEY: "a" * 64, checkpoint_files.TOKENIZER_HASH_KEY: "b" * 64}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save_checkpoint(tmp_path / "run", TENSORS, config=CONFIG, metadata=HASHES)
    return tmp_path / "run"


def read_files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_checkpoint_round_trips(saved):
    loaded = checkpoint.load_tensors(saved, TENSORS)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert checkpoint_files.read_config(saved) == CONFIG
    assert checkpoint_files.read_metadata(saved).items() >= HASHES.items()
    assert sorted(read_files(saved)) == ["config.json", "model.safetensors"]


def test_saving_again_replaces_both_files(saved):
    new = {"fc.weight": torch.ones(2, 3).T}
    checkpoint.save_checkpoint(saved, new, config={}, metadata={})
    assert torch.equal(load_file(saved / "model.safetensors")["fc.weight"], new["fc.weight"])
    assert checkpoint_files.read_config(saved) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": torch.ones(1)}, "lacks norm.weight"),
        ({"d2t": None}, "has the unknown tensor d2t"),
        ({"fc.weight": torch.ones(3, 2)}, r"has fc.weight of shape \[2, 3\] instead of \[3, 2\]"),
        ({"d2t": torch.ones(2)}, "has d2t as torch.int64 instead of torch.float32"),
    ],
)
def test_any_difference_is_refused_by_name(saved, change, message):
    expected = {name: value for name, value in (TENSORS | change).items() if value is not None}
    with pytest.raises(UserError, match=f"checkpoint: .*{message}"):
        checkpoint.load_tensors(saved, expected)


def test_expected_tensors_may_be_on_the_meta_device(saved):
    expected = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    assert torch.equal(checkpoint.load_tensors(saved, expected)["d2t"], TENSORS["d2t"])


@pytest.mark.parametrize("size", [0, 5, 60, -4])
def test_a_truncated_file_is_refused(saved, size):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"checkpoint: .*model\.safetensors, which is truncated"):
        checkpoint.load_tensors(saved, TENSORS)
    with pytest.raises(UserError, match="truncated"):
        checkpoint_files.read_metadata(saved)


def test_a_broken_config_is_refused(saved):
    (saved / "config.json").write_text('{"model_type":')
    with pytest.raises(UserError, match=r"config\.json, which is truncated"):
        checkpoint_files.read_config(saved)


def test_weights_in_fp8_are_read_and_must_be_finite(tmp_path):
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    for name, value in {"intact": 1.0, "broken": float("nan")}.items():
        tensors = {"fc.weight": weight.float().fill_(value).to(torch.float8_e4m3fn)}
        checkpoint.save_checkpoint(tmp_path / name, tensors, config={}, metadata={})
    assert checkpoint.load_tensors(tmp_path / "intact", {"fc.weight": weight})["fc.weight"].float().sum() == 4
    with pytest.raises(UserError, match=r"fc\.weight with values that are not finite"):
        checkpoint.load_tensors(tmp_path / "broken", {"fc.weight": weight})


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must be a folder with model\.safetensors"):
        checkpoint.load_tensors(tmp_path, TENSORS)
    with pytest.raises(UserError, match=r"must be a folder with config\.json"):
        checkpoint_files.read_config(tmp_path / "nowhere")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(saved, name):
    before = read_files(saved)
    (saved / (name + files.PARTIAL_SUFFIX)).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"output_dir: .*No space left on device"):
        checkpoint.save_checkpoint(saved, {"other": torch.zeros(9999)}, config={"new": 1}, metadata={})
    assert {path.name for path in saved.iterdir()} == before.keys()
    assert read_files(saved) == before


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="output_dir: must be a writable folder"):
        checkpoint.save_checkpoint(tmp_path / "file" / "run", TENSORS, config=CONFIG, metadata={})


def test_a_kill_while_writing_leaves_the_old_checkpoint(saved):
    """The process dies with the temporary file half written; the next save removes it."""
    before = read_files(saved)
    script = (
        "import os, pathlib, sys\nfrom models.io.files import atomic_path\n"
        "with atomic_path(pathlib.Path(sys.argv[1])) as partial:\n"
        "    partial.write_bytes(b'half'); os.kill(os.getpid(), 9)\n"
    )
    path = saved / "model.safetensors"
    killed = subprocess.run([sys.executable, "-c", script, path], env=os.environ, check=False)
    assert killed.returncode == -9
    left = read_files(saved)
    assert left.pop(path.name + files.PARTIAL_SUFFIX) == b"half"
    assert left == before

    checkpoint.save_checkpoint(saved, TENSORS, config=CONFIG, metadata=HASHES)
    assert read_files(saved).keys() == before.keys()
    checkpoint.load_tensors(saved, TENSORS)


def test_an_atomic_directory_appears_complete(tmp_path):
    left_by_a_kill = tmp_path / ("step-1" + files.PARTIAL_SUFFIX)
    left_by_a_kill.mkdir()
    (left_by_a_kill / "old").touch()
    with files.atomic_directory(tmp_path / "step-1") as partial:
        assert partial == left_by_a_kill
        (partial / "deep").mkdir()
        (partial / "deep" / "state").write_text("1")
        assert not (tmp_path / "step-1").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["step-1", "deep", "state"]


def test_an_atomic_directory_vanishes_on_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), files.atomic_directory(tmp_path / "step-1") as partial:
        (partial / "state").write_text(str(1 / 0))
    assert not list(tmp_path.iterdir())


def test_another_target_or_tokenizer_is_refused():
    fits = {"target_hash": "a" * 64, "tokenizer_hash": "b" * 64}
    checkpoint.check_metadata(HASHES, **fits)
    checkpoint.check_metadata({}, **fits)  # a published draft without hashes
    with pytest.raises(UserError, match="checkpoint: must be distilled for this target"):
        checkpoint.check_metadata(HASHES, **fits | {"target_hash": "c" * 64})
    with pytest.raises(UserError, match="checkpoint: must be distilled for this tokenizer"):
        checkpoint.check_metadata(HASHES, **fits | {"tokenizer_hash": "c" * 64})
