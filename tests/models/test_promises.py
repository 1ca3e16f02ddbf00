"""Every drafting method keeps these promises (docs/adding_a_method.md)."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.drafts.base import Draft, DraftState, ReadPrompts
from models.drafts.loss import compute_loss
from models.drafts.ngram import MixedDraft
from models.drafts.options import METHODS
from models.drafts.registry import load_draft
from models.io.errors import UserError
from models.lora import merge_adapters
from models.losses.config import LossName
from models.targets.cache import StaticCache
from models.targets.target import Target
from models.trees.sampling import Sampler
from models.trees.sampling_config import SamplingConf
from tests.support.models.methods import CASES, DEPTH, EVERY_CASE, choose_varied_text, measure_share_of_maximum
from tests.support.models.tiny import CPU, batch_of, chain, learn, mixed, sampled_texts, static, tiny_target, tree
from tests.support.runs.toy_run import toy_conf, toy_run, weights

SAMPLED_CASES = [  # a feature draft, independent heads and a model; every key is tested above
    name if name in ("eagle3", "medusa", "draft model") else pytest.param(name, marks=pytest.mark.system)
    for name in CASES
]
SHAPES = {"chain": chain(DEPTH), "static": static(), "dynamic": tree(), "mixed": mixed()}


@pytest.mark.parametrize("name", EVERY_CASE)
def test_the_heads_that_a_loss_trains_are_those_that_the_options_promise(name, target):
    draft = CASES[name].build(target)
    heads = draft.list_loss_heads()
    assert bool(heads) == CASES[name].conf.trains_heads
    assert all(head.weight.requires_grad for head in heads)


@dataclass(kw_only=True)
class Learned:
    """A draft that has learned a single text, the target that verifies it, and its checkpoint."""

    draft: Draft
    verifier: Target
    text: list[int]
    folder: Path


@pytest.fixture(scope="module", params=EVERY_CASE)
def learned(request, target, tmp_path_factory):
    case = CASES[request.param]
    text = choose_varied_text(target)
    draft = case.build(target)
    before = [p.clone() for p in target.model.parameters()]
    learn(draft, target, batch_of([text]), steps=500, lr=case.lr)
    assert all(map(torch.equal, before, target.model.parameters()))
    folder = tmp_path_factory.mktemp("learned") / "checkpoint"
    draft.save(folder, target)
    draft.eval()
    verifier = draft.get_verifying_target(target)
    start = Decoder(verifier, sampling=SamplingConf(), slots=64)
    (row,) = start.decode([text[:5]], row_ids=[0], max_new_tokens=37)
    return Learned(draft=draft, verifier=verifier, text=text[:5] + row.ids, folder=folder)


def test_every_method_has_a_case():
    assert {type(case.conf) for case in CASES.values()} == set(METHODS.values())


@pytest.mark.parametrize("name", EVERY_CASE)
def test_the_context_of_a_piece_is_learned_in_the_piece_before(target, name):
    draft, batch = CASES[name].build(target), batch_of(sampled_texts(target, count=2, length=24))
    output = run_target(target, draft.needs.layers, batch)
    extras = draft.prepare_batch(batch, step=0, generators=[])
    context = replace(batch, context_mask=torch.ones_like(batch.answer_mask))
    whole, nothing = (compute_loss(draft.loss_terms(part, output, **extras)).total for part in (batch, context))
    assert whole > 0
    assert nothing == 0


def test_a_learned_text_is_accepted(learned):
    """Exact output cannot show a broken draft: verification repairs it."""
    assert measure_share_of_maximum(learned.verifier, learned.draft, learned.text) >= 0.9


def test_the_checkpoint_round_trips(learned, target):
    """Every tensor survives, an adapted target's too, and so does the acceptance on a known and on a new text."""
    again = load_draft(learned.folder, target)
    assert type(again.conf) is METHODS[learned.draft.method]
    verifier = again.get_verifying_target(target)
    assert (verifier is target) == (learned.verifier is target)
    for ours, theirs in [(learned.draft, again), (learned.verifier.model, verifier.model)]:
        before, after = merge_inference_tensors(ours), merge_inference_tensors(theirs)
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    for prompt in (learned.text[:5], list(range(7, 16))):
        first, second = (
            Decoder(lm, draft, chain(DEPTH), sampling=SamplingConf(), slots=64).decode(
                [prompt], row_ids=[0], max_new_tokens=30
            )[0]
            for lm, draft in [(learned.verifier, learned.draft), (verifier, again)]
        )
        assert (first.ids, first.accepted) == (second.ids, second.accepted)
    untrained = again.rebuild_untrained(target)
    assert isinstance(untrained, Draft)
    assert measure_share_of_maximum(verifier, untrained, learned.text) < 0.6


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_checkpoint_decodes_in_the_dtype_of_its_target(case, tmp_path):
    """Engines decode in the dtype of the target; only rotary frequencies stay in fp32."""
    half = replace(CPU, dtype=torch.bfloat16)
    target = tiny_target(seed=0, device=half)
    CASES[case].build(target).save(tmp_path / "checkpoint", target)
    loaded = load_draft(tmp_path / "checkpoint", target)
    verifier = loaded.get_verifying_target(target)
    for draft in (loaded, loaded.rebuild_untrained(verifier)):
        assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
        buffers = [buffer for _, buffer in draft.named_buffers() if buffer.is_floating_point()]
        assert {buffer.dtype for buffer in buffers} <= {torch.float32}
        decoder = Decoder(verifier, draft, tree(), sampling=SamplingConf(), slots=32)
        (row,) = decoder.decode([[5, 6, 7]], row_ids=[0], max_new_tokens=12)
        assert len(row.ids) == 12


def merge_inference_tensors(module):
    """Return the tensors with adapters merged in, without those that only training needs."""
    return {name: t for name, t in merge_adapters(module).items() if not name.startswith("adapters.")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_proposal_leaves_the_state_unchanged(case, shape, target):
    """Only scratch may change: the slots of a cache after the known tokens."""
    draft = CASES[case].build(target).eval()
    draft = MixedDraft(draft) if SHAPES[shape].ngram_tokens else draft
    ids, lengths = torch.arange(1, 19).view(2, 9), torch.tensor([9, 6])
    with torch.no_grad():
        seen = run_target(target, draft.needs.layers, batch_of(ids.tolist()))
        prompts = ReadPrompts(ids=ids, lengths=lengths, first_token=torch.tensor([3, 4]), target_output=seen)
        state = draft.start(draft.new_state(2, 64), prompts)
        before = copy_committed(state)
        for temperature in (0.0, 1.0):
            sampler = Sampler(rule=SamplingConf(temperature=temperature))
            draft.propose(state, tree=SHAPES[shape], sampler=sampler)
    after = copy_committed(state)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def copy_committed(state: DraftState) -> dict[str, Tensor]:
    """Copy the tensors of a state; caches without the slots after the known tokens."""
    tensors = {}
    for name, value in state.items():
        if isinstance(value, dict):
            tensors |= {f"{name}.{key}": tensor for key, tensor in copy_committed(value).items()}
            continue
        parts = {name: value}
        if isinstance(value, StaticCache):
            caches = [*value.keys, *value.values, value.positions[:, None]]
            parts = {f"{name}.{i}": cache for i, cache in enumerate(caches)}
        for part, tensor in parts.items():
            is_cache = tensor.ndim > 2
            rows = enumerate(state["lengths"].tolist()) if is_cache else [(slice(None), None)]
            tensors |= {
                f"{part}.{row}": tensor[row][:, :end].clone() if is_cache else tensor.clone() for row, end in rows
            }
    return tensors


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_is_that_of_transformers(learned, shape):
    """This holds for a new text too, in a batch of prompts of unequal lengths."""
    prompts = [learned.text[:5], list(range(7, 16))]
    decoder = Decoder(learned.verifier, learned.draft, SHAPES[shape], sampling=SamplingConf(), slots=64, batch=2)
    decoded = decoder.decode(prompts, row_ids=[0, 1], max_new_tokens=24)
    for prompt, row in zip(prompts, decoded, strict=True):
        expected = learned.verifier.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        assert row.ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_sampled_output_is_that_of_the_same_key(learned, shape):
    sampling = SamplingConf(temperature=1.0, seed=3)
    decoders = [
        Decoder(learned.verifier, learned.draft, SHAPES[shape], sampling=sampling, slots=64),
        Decoder(learned.verifier, sampling=sampling, slots=64),
    ]
    drafted, plain = (decoder.decode([learned.text[:5]], row_ids=[7], max_new_tokens=30)[0] for decoder in decoders)
    assert drafted.ids == plain.ids


@pytest.mark.parametrize("learned", SAMPLED_CASES, indirect=True)
def test_sampled_output_has_the_targets_distribution(learned):
    """The joint distribution covers the first token, which the target samples alone, and the first drafted token."""
    prompt, count, batch = learned.text[:5], 4000, 500
    sampling = SamplingConf(temperature=1.0)
    decoder = Decoder(learned.verifier, learned.draft, SHAPES["dynamic"], sampling=sampling, slots=16, batch=batch)
    expected_counts = count * compute_pair_distribution(learned.verifier, prompt)
    seen = torch.zeros_like(expected_counts)
    for first in range(0, count, batch):
        keys = list(range(first, first + batch))
        for row in decoder.decode([prompt] * batch, row_ids=keys, max_new_tokens=2):
            seen[tuple(row.ids)] += 1
    often = expected_counts >= 5
    assert often.sum() >= 20
    observed, expected = (torch.cat([pairs[often], pairs[~often].sum()[None]]) for pairs in (seen, expected_counts))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@torch.no_grad()
def compute_pair_distribution(verifier, prompt):
    """Compute the exact joint distribution of the first two new tokens."""
    first = verifier.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    texts = torch.tensor([[*prompt, token] for token in range(len(first))])
    return first[:, None] * verifier.model(texts).logits[:, -1].double().softmax(-1)


def test_another_target_is_refused(learned):
    with pytest.raises(UserError, match=r"checkpoint: .*target"):
        load_draft(learned.folder, tiny_target(seed=1))


@pytest.mark.parametrize("name", EVERY_CASE)
def test_the_loss_falls(target, name):
    """The forward KL can fall to 0, while cross entropy stays above the target's entropy."""
    case = CASES[name]
    batch = batch_of(sampled_texts(target, count=4, length=24))
    draft = case.build(target, loss=LossName.forward_kl)
    losses = []
    for _ in range(2):
        seen = run_target(target, draft.needs.layers, batch)
        loss = compute_loss(draft.loss_terms(batch, seen))
        losses.append(float(loss.total.detach() / loss.weight))
        learn(draft, target, batch, steps=40, lr=case.lr)
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", EVERY_CASE)
def test_every_trained_weight_moves_in_bf16(target, name):
    """Heads without a gradient and steps too small for bf16 are known faults of shipped drafts."""
    draft = CASES[name].build(target)
    batch = batch_of(sampled_texts(target, count=4, length=24))
    before = {name: p.clone() for name, p in draft.named_parameters() if p.requires_grad}
    assert all(parameter.dtype == torch.float32 for parameter in before.values())
    for _ in range(5):  # autocast keeps what it has cast until it ends
        with torch.autocast("cpu", torch.bfloat16):
            learn(draft, target, batch, steps=1, lr=1e-4)
    stuck = [name for name, p in draft.named_parameters() if torch.equal(p, before.get(name, p))]
    assert {name for name in stuck if name in before} == set()


@pytest.mark.parametrize("name", EVERY_CASE)
def test_a_continued_run_ends_in_the_same_weights_bit_for_bit(name, tmp_path):
    conf = CASES[name].conf
    layers = {"layers": [0, 1]} if hasattr(conf, "layers") else {}  # the toy target has two
    conf = toy_conf(draft=replace(conf, **layers))
    toy_run(tmp_path / "unbroken", conf)
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path / "broken", conf, interrupt_at=7)
    toy_run(tmp_path / "broken", conf)
    unbroken, broken = weights(tmp_path / "unbroken"), weights(tmp_path / "broken")
    assert unbroken.keys() == broken.keys()
    assert all(torch.equal(unbroken[key], broken[key]) for key in unbroken)
