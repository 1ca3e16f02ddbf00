"""Training on packed rows has the loss, weight and gradient of training on each document alone."""

import numpy as np
import pytest
import torch

from data.features.target_pass import run_target
from data.packing.documents import Documents, Packed
from data.packing.pack import cut_documents, pack_documents
from data.sources.rows import document_from_pair
from models.drafts.base import Draft
from models.drafts.loss import compute_loss
from models.drafts.registry import build_draft
from models.losses.config import LossConf, LossName, Reduction
from models.targets.target import Target
from tests.support.models.methods import CASES
from tests.support.models.tiny import VOCAB, tiny_target

LENGTH = 48
METHODS = ["eagle3", "hass", "medusa", "hydra", "hydra++", "draft model"]


def draw_documents() -> Documents:
    """Draw twelve documents of 6 to 40 random tokens, some with two answers."""
    numbers = np.random.default_rng(0)
    documents = []
    for size in numbers.integers(6, 41, 12):
        ids = numbers.integers(1, VOCAB, size).tolist()
        document = document_from_pair(ids[:3], ids[3:])
        if size > 20:
            document.answer[10:14] = [False] * 4
        documents.append(document)
    return Documents.from_documents(documents)


def put_in_own_rows(documents: Documents) -> Packed:
    """Return each document in a row of its own."""
    numbers = np.arange(len(documents))
    table = cut_documents(documents.lengths, numbers, LENGTH, None)
    starts = np.arange(len(documents) + 1)
    return Packed(documents=documents, table=table, starts=starts, length=LENGTH)


def compute_gradients(draft: Draft, target: Target, rows: Packed) -> dict[str, torch.Tensor]:
    """Return loss, weight and the gradient of every trained weight."""
    batch = rows.batch(list(range(len(rows))))
    with torch.no_grad():
        target_features = run_target(target, draft.needs.layers, batch)
    draft.zero_grad()
    loss = compute_loss(draft.loss_terms(batch, target_features))
    loss.total.backward()
    gradients = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
    return {"total": loss.total.detach(), "weight": loss.weight, **gradients}


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("method", METHODS)
def test_packed_rows_have_the_loss_and_gradient_of_separate_documents(method, reduction):
    target, documents = tiny_target(seed=0), draw_documents()
    conf = LossConf(name=LossName.soft_ce, reduction=reduction)
    draft = build_draft(CASES[method].conf, target, loss=conf, seed=0)
    packed, report = pack_documents(documents, LENGTH)
    assert report.rows < len(documents) == report.documents
    apart, together = (
        compute_gradients(draft, target, put_in_own_rows(documents)),
        compute_gradients(draft, target, packed),
    )
    assert apart.keys() == together.keys()
    assert len(apart) > 2
    for name, expected in apart.items():
        error = (together[name] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name} is off by {error:.2g}"
