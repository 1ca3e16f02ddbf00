"""Stored features are those of the live target at every position that a loss reads."""

import copy
import re

import psutil
import pytest
import torch

from data.config import CaptureConf, Dtype, TeacherKind
from data.features.manifest import read_manifest
from data.features.reader import FeatureStore
from data.features.target_pass import run_target
from data.packing.pack import pack_documents
from models.device.opening import open_device
from models.drafts.base import Needs
from models.drafts.options import CausalLMConf, Eagle1Conf, Eagle3Conf, HydraConf, InitFrom, MedusaConf
from models.losses.distributions import TopKLogits
from models.losses.loss_weights import shift_left
from models.targets.loading import freeze_model, load_target
from scripts.benchmarks import store_read
from tests.support.data.captured import EAGLE3, LENGTH, captured, conf, files, opened, write_documents, written
from tests.support.models.tiny import CPU, LAYERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    return written(tmp_path_factory.mktemp("store"), target)


def find_taught_tokens(batch):
    """Return the mask of the tokens of an answer and of those before it."""
    same = shift_left(batch.document_ids, 1, fill=-1) == batch.document_ids
    return (batch.answer_mask | (shift_left(batch.answer_mask, 1).bool() & same)) & (batch.document_ids >= 0)


def iter_live_and_stored(target, store, layers, *, length=LENGTH, overlap=None, rows_at_a_time=2):
    """Yield batches with the features of the target and those of the store."""
    packed, _ = pack_documents(store.documents, length, overlap=overlap)
    for first in range(0, len(packed), rows_at_a_time):
        rows = [(first + i) % len(packed) for i in range(rows_at_a_time)]
        batch = packed.batch(rows)
        with torch.no_grad():
            live = run_target(target, layers, batch)
        yield batch, live, store.read_target_output(packed.pieces(rows), length)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_bf16_store_holds_the_features_of_the_live_pass(folder, precision):
    """They are equal bit for bit where the target computes in bf16, else rounded once."""
    capture_conf = conf(folder, precision=precision, dtype=Dtype.bf16, run_name=precision)
    target = load_target(capture_conf.target, open_device(capture_conf.device))
    store = opened(captured(capture_conf), target, dtype=target.device.dtype)
    for batch, live, stored in iter_live_and_stored(target, store, LAYERS):
        taught, every = find_taught_tokens(batch), batch.document_ids >= 0
        assert stored.captured.dtype == live.captured.dtype == target.device.dtype
        assert torch.equal(stored.captured[every], live.captured[every].bfloat16().to(live.captured))
        assert torch.equal(stored.hidden[taught], live.hidden[taught].bfloat16().to(live.hidden))
        assert not stored.captured[~every].any()
        assert not stored.hidden[~taught].any()


@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.fp8])
def test_int8_and_fp8_stores_are_exact_to_their_rounding(folder, target, dtype):
    store = opened(captured(conf(folder, dtype=dtype, run_name=dtype.value)), target)
    for batch, live, stored in iter_live_and_stored(target, store, LAYERS):
        every = batch.document_ids >= 0
        ours, theirs = (x.captured[every].unflatten(-1, (3, 32)) for x in (stored, live))
        largest = theirs.abs().amax(-1, keepdim=True)
        step = largest / 127 if dtype is Dtype.int8 else torch.maximum(theirs.abs() / 8, largest / 2**17)
        assert ((ours - theirs).abs() <= step * 0.501).all()
        assert 0 < (ours - theirs).norm() / theirs.norm() < 0.04


METHODS = {
    "eagle1": (Eagle1Conf(ttt_steps=2), Needs(layers=[], hidden=True, context=True)),
    "medusa": (MedusaConf(heads=2), Needs(layers=[], hidden=True, context=False)),
    "hydra": (HydraConf(heads=2, prefix=False), Needs(layers=[], hidden=True, context=False)),
    "hydra++": (HydraConf(heads=2, prefix=True), Needs(layers=[], hidden=True, context=True)),
    "draft model": (
        CausalLMConf(init_from=InitFrom.pruned, layers=[0, 3]),
        Needs(layers=[], hidden=False, context=False),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_store_holds_the_features_that_each_method_needs(folder, target, name):
    draft, needs = METHODS[name]
    store = opened(captured(conf(folder, draft=draft, dtype=Dtype.bf16, run_name=name)), target, needs)
    for batch, live, stored in iter_live_and_stored(target, store, []):
        taught = batch.document_ids >= 0 if needs.hidden and needs.context else find_taught_tokens(batch)
        assert torch.equal(stored.hidden[taught], live.hidden[taught].bfloat16().float())
        assert not stored.hidden[~taught].any()
        assert stored.captured is None


def test_the_teacher_may_be_the_k_likeliest_tokens(folder, target):
    """They are exact to fp16's rounding, with the mass of the others; other positions hold some distribution."""
    capture_conf = conf(folder, teacher=TeacherKind.topk, top_k=5, run_name="topk")
    store = opened(captured(capture_conf), target)
    for batch, live, stored in iter_live_and_stored(target, store, LAYERS):
        taught, topk = find_taught_tokens(batch), stored.topk
        exact = TopKLogits.from_logits(target.logits(live.hidden), 5)
        assert not stored.hidden.any()
        assert torch.equal(topk.ids[taught], exact.ids[taught])
        assert torch.allclose(topk.log_probs[taught], exact.log_probs[taught], rtol=2**-11, atol=1e-7)
        assert torch.equal(topk.rest[taught], exact.rest[taught])
        total = topk.log_probs.exp().sum(-1) + topk.rest
        assert torch.allclose(total, torch.ones_like(total), atol=2e-3)


def test_a_store_serves_other_lengths_and_methods(folder, target):
    """It serves rows of another length, and a method that needs no more than is stored."""
    medusa = Needs(layers=[], hidden=True, context=False)
    path = captured(conf(folder, dtype=Dtype.bf16, run_name="any"))
    for length in (20, 70):
        store = opened(path, target, medusa)
        for batch, live, stored in iter_live_and_stored(target, store, [], length=length):
            taught = find_taught_tokens(batch)
            assert torch.allclose(stored.hidden[taught], live.hidden[taught], atol=0.02, rtol=0.02)


def test_split_documents_are_stored_once(tmp_path, target):
    """Each token is stored with the piece that reads most of its document; every taught row is stored."""
    folder = written(tmp_path, target)
    write_documents(folder / "documents.jsonl", seed=1, longest=4 * LENGTH)
    needs = Needs(layers=[], hidden=True, context=False)
    capture_conf = conf(folder, draft=MedusaConf(heads=2), overlap=8, dtype=Dtype.bf16)
    store = opened(captured(capture_conf), target, needs)
    assert store.documents.lengths.max() > LENGTH
    assert len(store.segment_index.first) > len(store.documents)
    assert store.segment_index.tokens.sum() <= len(store.documents.ids)
    for batch, live, stored in iter_live_and_stored(target, store, [], overlap=8):
        taught = find_taught_tokens(batch) & ~batch.context_mask
        assert torch.allclose(stored.hidden[taught], live.hidden[taught], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("teacher", TeacherKind)
def test_a_store_has_the_size_that_the_docs_promise(folder, dtype, teacher):
    """Compute the sizes of docs/features.md, "Bytes a token", for EAGLE-3."""
    run_name = f"bytes {dtype.value} {teacher.value}"
    path = captured(conf(folder, dtype=dtype, teacher=teacher, top_k=7, run_name=run_name))
    spec = read_manifest(path).spec
    width, layers, k = spec.schema.hidden_size, len(spec.schema.layers), 7
    row = 2 * width if dtype is Dtype.bf16 else width + 4
    find_taught_tokens = row if teacher is TeacherKind.hidden else 6 * k + 4
    features = layers * row * spec.tokens + find_taught_tokens * spec.supervised
    index = 6 * spec.tokens + 60 * spec.documents + 8
    headers = [8 + int.from_bytes(data[:8], "little") for data in files(path).values()]
    assert sum(map(len, files(path).values())) == features + index + sum(headers)


def test_a_store_is_memory_mapped(tmp_path):
    """Opening loads none of it; reading takes memory that the system can reclaim."""
    settings = CaptureConf(draft=Eagle3Conf(), run_name="random")
    size = store_read.write_random_store(settings, EAGLE3, 1024, tmp_path).total_bytes
    before = psutil.Process().memory_info()
    store = FeatureStore(
        tmp_path, target_hash="", tokenizer_hash="", needs=EAGLE3, dtype=torch.bfloat16, checksums=False
    )
    assert psutil.Process().memory_info().rss - before.rss < size / 10
    rows, _ = pack_documents(store.documents, 2048)
    for row in range(len(rows)):
        assert store.read_target_output(rows.pieces([row]), 2048).captured.any()
    after = psutil.Process().memory_info()
    assert (after.rss - after.shared) - (before.rss - before.shared) < size / 2


def test_outliers_lose_values_in_int8_that_fp8_preserves(tmp_path, target, caplog):
    """Beside a value of 1e4, int8 rounds values of about 1 to 0 and warns of it."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 7] = 1e4
    folder = written(tmp_path, freeze_model(model, target.tokenizer, name="outliers", device=CPU))
    caplog.set_level("INFO")
    lost = {}
    for dtype in (Dtype.int8, Dtype.fp8):
        caplog.clear()
        captured(conf(folder, dtype=dtype, run_name=dtype.value))
        lost[dtype] = max(map(float, re.findall(r"([\d.]+)% of its values to 0", caplog.text)))
        assert ("try fp8" in caplog.text) == (dtype is Dtype.int8)
    assert lost[Dtype.int8] > 90
    assert lost[Dtype.fp8] < 5
