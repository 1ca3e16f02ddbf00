"""`python -m data.capture` is bounded and resumable, and names and replaces a damaged file."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from types import SimpleNamespace

import pytest
import torch

from data.config import DataConf, DataSource, Dtype, TeacherKind
from data.features import manifest as store_manifest
from data.features.manifest import DOCUMENTS_FILE, shard_name
from models.drafts.base import Needs
from models.drafts.options import CausalLMConf, Medusa2Conf
from models.io.errors import UserError
from models.io.files import PARTIAL_SUFFIX
from models.operators import MAX_TOPK_COLUMNS
from tests.support.data.captured import COMMAND, EAGLE3, captured, conf, files, opened, written
from tests.support.models.tiny import LAYERS, tiny_target
from tests.support.models.watching import WatchedOperators
from tests.support.runs.killing import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Return a folder with documents and a store of several shards."""
    folder = written(tmp_path_factory.mktemp("capture"), target)
    captured(conf(folder))
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy of the folder, which a test may damage."""
    subprocess.run(["cp", "-r", f"{folder}/.", tmp_path], check=True)
    return tmp_path


def assert_refused(match: str, run) -> str:
    with pytest.raises(UserError, match=match) as error:
        run()
    assert "\n" not in str(error.value)
    return str(error.value)


def flip_bit(path, position: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path) -> None:
    os.truncate(path, 300)


DAMAGES = [
    *(("changed", partial(flip_bit, position=position)) for position in (3, 20, 2000, -1)),
    ("truncated: 300 of", truncate),
    ("missing", os.remove),
]


@pytest.mark.parametrize("name", [shard_name(1), DOCUMENTS_FILE])
@pytest.mark.parametrize(("damage", "apply"), DAMAGES)
def test_a_damaged_file_is_named_and_it_alone_is_captured_again(copy, target, name, damage, apply):
    store = copy / "capture" / "small"
    intact, before = files(store), {path.name: path.stat().st_mtime_ns for path in store.glob("*.safetensors")}
    apply(store / name)
    message = assert_refused(f"{name}, which is {damage}", lambda: opened(store, target))
    assert f"`{COMMAND}` with output_dir={store.parent} run_name=small rewrites only this" in message
    captured(conf(copy))
    assert files(store) == intact
    assert [n for n in intact if (store / n).stat().st_mtime_ns != before[n]] == [name]
    opened(store, target)


def test_a_finished_store_is_left_alone(folder, caplog):
    store = folder / "capture" / "small"
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    captured(conf(folder))
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before


def test_stores_of_another_target_tokenizer_or_draft_are_refused(folder, target):
    store = folder / "capture" / "small"
    other = tiny_target(seed=1)
    assert_refused("must be a store of this target", lambda: opened(store, other))
    other.tokenizer_fingerprint = "another"
    assert_refused("must be a store of this tokenizer", lambda: opened(store, other))
    assert_refused(
        r"captured layers \[1, 2, 3\], got \[1, 3, 5\]",
        lambda: opened(store, target, replace(EAGLE3, layers=[1, 2, 3])),
    )
    every = Needs(layers=[], hidden=True, context=True)
    assert_refused("of every token, got that of supervised", lambda: opened(store, target, every))
    assert_refused("must be a feature store", lambda: opened(folder, target))
    manifest = store_manifest.read_manifest(store)
    early = {"tokenizer_hash": target.tokenizer_fingerprint, "needs": EAGLE3}
    manifest.check_serves(store, hidden_size=32, **early)
    assert_refused(
        r"of this target .hidden size 64., got .* .hidden size 32.;",
        lambda: manifest.check_serves(store, hidden_size=64, **early),
    )


def test_other_versions_and_broken_manifests_are_refused(copy, target):
    store = copy / "capture" / "small"
    path = store / "manifest.json"
    intact, before = path.read_text(), files(store)
    path.write_text(intact.replace('"version": 4', '"version": 2'))
    assert_refused("must be a store of version 4, got version 2", lambda: opened(store, target))
    for damaged in (intact[:100], intact.replace('"hidden_size": 32', '"hidden_size": "?"'), "[]", ""):
        assert damaged != intact
        path.write_text(damaged)
        message = assert_refused("manifest as it was written", lambda: opened(store, target))
        assert "remove it and capture again" in message
        assert_refused("manifest as it was written", lambda: captured(conf(copy)))
    path.unlink()
    captured(conf(copy))
    assert files(store) == before
    opened(store, target)


@pytest.mark.parametrize("name", [shard_name(1), DOCUMENTS_FILE])
@pytest.mark.parametrize("damage", [*(partial(flip_bit, position=position) for position in (3, 20, 90)), truncate])
def test_a_file_with_a_damaged_header_or_another_size_is_named_without_checksums(copy, target, name, damage):
    store = copy / "capture" / "small"
    damage(store / name)
    assert_refused(f"{name}, which is (changed|truncated): ", lambda: opened(store, target, checksums=False))


def test_a_moved_store_is_repaired_in_its_new_folder(copy, target):
    complete = files(copy / "capture" / "small")
    store = (copy / "capture" / "small").rename(copy / "moved")
    opened(store, target)
    (store / shard_name(2)).unlink()
    message = assert_refused("which is missing", lambda: opened(store, target))
    assert f"with output_dir={copy} run_name=moved rewrites only this file" in message
    captured(replace(conf(copy), output_dir=str(copy), run_name="moved"))
    assert files(store) == complete
    assert not (copy / "capture" / "small").exists()


def test_after_a_full_disk_the_complete_files_are_used_again(folder, tmp_path):
    """Nothing larger than the documents' file can be written for a while."""
    capture_conf = replace(conf(folder), output_dir=str(tmp_path))
    intact = files(folder / "capture" / "small")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(intact[DOCUMENTS_FILE]), hard))
    try:
        # The limit holds for printed lines too if they go to a file.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert_refused("File too large.; make room and repeat the command", lambda: captured(capture_conf))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    stored = files(tmp_path / "small")
    assert DOCUMENTS_FILE in stored
    assert stored.items() <= intact.items()
    assert not list((tmp_path / "small").glob(f"*{PARTIAL_SUFFIX}"))
    captured(capture_conf)
    assert files(tmp_path / "small") == intact


def test_a_store_that_does_not_fit_on_the_disk_is_refused(folder, tmp_path, monkeypatch):
    """A resumed capture needs room for the missing shards alone."""
    conf_here = replace(conf(folder), output_dir=str(tmp_path))
    store = files(folder / "capture" / "small")
    free = sum(map(len, store.values())) // 2
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    message = assert_refused("output_dir: must have room for", lambda: captured(conf_here))
    assert f"GB free in {tmp_path}" in message
    shutil.copytree(folder / "capture" / "small", tmp_path / "small", dirs_exist_ok=True)
    (tmp_path / "small" / shard_name(1)).unlink()
    captured(conf_here)
    assert files(tmp_path / "small") == store


def test_another_capture_of_the_same_name_is_refused(folder):
    assert_refused("dtype int8 instead of fp8", lambda: captured(conf(folder, dtype=Dtype.fp8)))
    assert_refused("documents 40 instead of 7", lambda: captured(conf(folder, limit=7)))


def test_another_target_of_the_same_name_is_refused(copy):
    tiny_target(seed=1).model.save_pretrained(copy / "target")
    (copy / "capture" / "small" / shard_name(1)).unlink()
    assert_refused("one of this target, got .* other weights", lambda: captured(conf(copy)))


@pytest.mark.system
def test_a_killed_capture_is_resumed_to_the_same_store(folder, tmp_path):
    """The capture is killed while it writes shards; finished shards are not written again."""
    capture_conf = conf(folder)
    capture_conf.output_dir = str(tmp_path)
    store = tmp_path / "small"
    arguments = [
        "target.path=" + capture_conf.target.path,
        "target.name=tiny",
        "draft.ttt_steps=2",
        f"draft.layers={LAYERS}",
        "data=jsonl",
        f"data.path={capture_conf.data.path}",
        f"data.row_length={capture_conf.data.row_length}",
        *"device=cpu device.compile=false batch=2 shard_mb=0.02 run_name=small".split(),
        f"output_dir={tmp_path}",
        "draft.vocab_size=null",
    ]
    killed = ["tests.support.runs.signaled", str(int(signal.SIGKILL)), f"*/{shard_name(2)}"]
    run = subprocess.run(
        [sys.executable, "-m", *killed, "data.capture", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    assert (store / shard_name(1)).exists()
    manifest = json.loads((store / "manifest.json").read_text())
    finished = {name: (store / name).stat().st_mtime_ns for name in manifest["files"]}
    assert DOCUMENTS_FILE in finished
    assert len(finished) <= manifest["spec"]["shards"]
    captured(capture_conf)
    assert files(store) == files(folder / "capture" / "small")
    assert all((store / name).stat().st_mtime_ns == written_ns for name, written_ns in finished.items())
    assert not list(store.glob(f"*{PARTIAL_SUFFIX}"))


def test_drafts_and_data_whose_features_cannot_be_stored_are_refused(folder):
    assert_refused(
        "must leave its target as it is, got medusa2",
        lambda: captured(conf(folder, draft=Medusa2Conf(heads=2), run_name="adapted")),
    )
    assert_refused("data.overlap: must be null for eagle3", lambda: captured(conf(folder, overlap=8, run_name="split")))
    again = DataConf(source=DataSource.captured, path=str(folder / "capture" / "small"))
    for data in (again, DataConf(source=DataSource.demo)):
        message = rf"must be documents, got {data.source.value}; run `python -m data.prepare`"
        assert_refused(message, lambda data=data: captured(replace(conf(folder), data=data)))


@pytest.mark.parametrize("stores_likeliest", [False, True])
def test_features_that_are_not_finite_are_refused(tmp_path, target, stores_likeliest):
    """For a language model the likeliest tokens alone are stored."""
    folder = written(tmp_path, target)
    broken = tiny_target(seed=0)
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[7] = torch.inf
    broken.model.save_pretrained(folder / "target")
    draft = CausalLMConf(name="tiny", path=str(folder / "target"))
    changes = {"draft": draft, "teacher": TeacherKind.topk, "top_k": 4} if stores_likeliest else {}
    assert_refused("features must be finite", lambda: captured(conf(folder, **changes)))


@pytest.mark.parametrize("shard_mb", [0.01, 0.03, 0.04])
def test_a_capture_goes_on_in_shards_of_the_same_rows_alone(copy, shard_mb):
    """Another size may give as many shards, of other rows than the index of the documents says."""
    store = copy / "capture" / "small"
    spec = store_manifest.read_manifest(store).spec
    (store / shard_name(1)).unlink()
    message = assert_refused(
        "must name a new store or the same capture", lambda: captured(conf(copy, shard_mb=shard_mb))
    )
    assert f"rows_per_shard {spec.rows_per_shard} instead of" in message


def test_the_likeliest_tokens_of_a_wide_vocabulary_are_stored_without_a_wide_top_k(tmp_path):
    folder = written(tmp_path, tiny_target(seed=0, padding=MAX_TOPK_COLUMNS))
    shapes = []

    def record_shape(func, args, _):
        if func.overloadpacket is torch.ops.aten.topk:
            shapes.append(args[0].shape)

    with WatchedOperators(record_shape):
        captured(conf(folder, teacher=TeacherKind.topk, top_k=4, limit=4))
    assert shapes
    assert max(columns for _, columns in shapes) <= MAX_TOPK_COLUMNS


def test_a_shard_has_the_configured_size(folder, tmp_path):
    """A shard has rows of complete batches, and at least one batch."""
    small = conf(folder, shard_mb=1e-6, run_name="small")
    small.output_dir = str(tmp_path)
    spec = store_manifest.read_manifest(captured(small)).spec
    large = store_manifest.read_manifest(captured(conf(folder, shard_mb=100.0, run_name="large"))).spec
    assert (large.shards, spec.tokens) == (1, large.tokens)
    assert spec.shards > store_manifest.read_manifest(folder / "capture" / "small").spec.shards


def test_files_that_the_manifest_does_not_record_are_written_again(copy):
    """One file is half written under its temporary name; another is complete, but not in the manifest."""
    store = copy / "capture" / "small"
    intact = files(store)
    manifest = store_manifest.read_manifest(store)
    del manifest.files[shard_name(1)]
    manifest.write(store)
    (store / shard_name(1)).write_bytes(intact[shard_name(2)])
    (store / f"{shard_name(1)}{PARTIAL_SUFFIX}").write_bytes(intact[shard_name(1)][:1000])
    captured(conf(copy))
    assert files(store) == intact
    assert not list(store.glob(f"*{PARTIAL_SUFFIX}"))
