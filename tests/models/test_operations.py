"""Training and decoding use no random draws, no reads of values and no rare operators."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.config import DataConf
from data.features.target_pass import run_target
from infer.engine.decode import Decoder, build_acceptance_rule
from infer.engine.phase_timer import PhaseTimer
from infer.verify.config import Verification
from models import operators
from models.drafts.loss import LossModule, compute_loss
from models.drafts.ngram import NgramDraft
from models.drafts.options import Eagle1Conf
from models.drafts.registry import build_draft
from models.layers import attend
from models.losses.chunked import evaluate_chunk
from models.losses.config import LossConf, LossName
from models.losses.distributions import TopKLogits
from models.targets import attention
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, TreeKind
from models.unrolled_attention import attend_unrolled
from tests.support.models.methods import CASES, QUICK
from tests.support.models.recorded import GRAPHS, build_recording_device, find_forbidden, list_operators, record_call
from tests.support.models.tiny import CPU, batch_of, chain, tiny_target
from tests.support.models.watching import WatchedOperators
from tests.support.runs.compiled_run import counted_reads
from tests.support.runs.graphs_run import LENGTH, ROWS, draw_texts, run_loop
from tests.support.runs.toy_run import toy_conf

RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal", "uniform")
# operations that the host must read, or whose number of results depends on values; only an eager
# CPU uses `nonzero`, to skip rows without weight (models/losses/chunked.py): no compiled graph does
DYNAMIC = ("_local_scalar_dense", "masked_select", "unique", "repeat_interleave")


@pytest.mark.parametrize("name", CASES)
def test_a_loss_draws_no_numbers_reads_no_values_and_has_shapes_that_no_value_changes(target, name):
    draft = CASES[name].build(target)
    batch = batch_of(draw_texts(*[LENGTH] * ROWS))
    seen = run_target(target, draft.needs.layers, batch)
    extras = draft.prepare_batch(batch, step=3, generators=build_generators(range(ROWS)))
    weights = draft.term_weights(batch)
    if weights is not None:
        extras["term_weight_sums"] = 2 * weights
    names = []
    with record_names(names):
        compute_loss(draft.loss_terms(batch, seen, **extras)).total.backward()
    assert "mul" in names
    assert not [n for n in names if any(word in n for word in (*RANDOM, *DYNAMIC))]


def record_names(names: list[str]) -> WatchedOperators:
    return WatchedOperators(lambda func, *_: names.append(func.overloadpacket.__name__))


def build_generators(rows):
    return [np.random.default_rng([0, 3, row]) for row in rows]


def test_noise_is_drawn_before_the_loss_from_numbers_that_belong_to_the_rows(target):
    draft = build_draft(Eagle1Conf(feature_noise=0.5), target, loss=LossConf(), seed=0)
    batch = batch_of(draw_texts(*[LENGTH] * ROWS))
    batch.document_ids[:, LENGTH // 4 :] = 1  # a short document and a long one
    seen = run_target(target, draft.needs.layers, batch)
    names = []
    with record_names(names):
        drawn = draft.prepare_batch(batch, step=3, generators=build_generators(range(ROWS)))
        disturbed = compute_loss(draft.loss_terms(batch, seen, **drawn)).total
    assert not [n for n in names if any(word in n for word in RANDOM)]
    assert disturbed != compute_loss(draft.loss_terms(batch, seen)).total
    backwards = draft.prepare_batch(batch, step=3, generators=build_generators(reversed(range(ROWS))))
    assert torch.equal(backwards["noise"], drawn["noise"].flip(0))
    short, long = LENGTH // 4, LENGTH - LENGTH // 4
    for noise, tokens in zip(drawn["noise"].split([short, long], 1), (short, long), strict=True):
        width = 0.5 * 512 / tokens  # of a uniform distribution around 0
        assert noise.abs().max() <= width / 2
        assert noise.std() == pytest.approx(width / 12**0.5, rel=0.05)


def test_the_host_reads_as_often_for_many_steps_as_for_few(target):
    """Logged figures are read in a single transfer; in each step AdamW reads its own count, on the host."""

    def reads(steps):
        conf = toy_conf(draft=CASES["medusa"].conf, optim={"steps": steps}, interval={"save": 99})
        conf.data, conf.interval.log, conf.interval.eval = DataConf(row_length=LENGTH), steps, 99
        draft = CASES["medusa"].build(target)
        names = []
        with counted_reads() as read, record_names(names):
            run_loop(conf, draft, target, CPU)
        counts = steps * sum(p.requires_grad for p in draft.parameters())
        scalars = names.count("_local_scalar_dense")
        return len(read) - counts, scalars - counts

    assert reads(2) == reads(8)


# --- recorded graphs --------------------------------------------------------------------------


def recorded_graphs(test):
    marks = pytest.mark.system, pytest.mark.no_shapes, pytest.mark.usefixtures("fresh_compiler")
    for mark in marks:
        test = mark(test)
    return test


DEEP = {"depth": 2, "beam_width": 2, "children": 3}  # two levels: from the second on, a beam is chosen
DYNAMIC_TREE, MIXED_TREE = (TreeConf(nodes=5, **DEEP, **ngram).build() for ngram in ({}, {"ngram_tokens": 3}))
STATIC_TREE = TreeConf(kind=TreeKind.static, paths=[[0], [1], [0, 0]]).build()


def build_decoding_modes():
    """Build the case of the draft, the tree and the sampling of each greedy mode, by name."""
    penalty = SamplingConf(repetition_penalty=1.2, presence_penalty=0.1)
    product = TreeConf(depth=2, nodes=5, beam_width=None, children=3).build()
    modes = {
        "autoregressive": (None, NO_TREE),
        "n-gram": ("ngram", chain(2)),
        "chain": ("eagle3", chain(2)),
        "static": ("eagle3", STATIC_TREE),
        "product": ("medusa", product),
        "mixed": ("eagle3", MIXED_TREE),
    }
    every = {f"a tree of {name}": (name, DYNAMIC_TREE) for name in QUICK}  # the cases of a class decode alike
    greedy = {name: (*mode, SamplingConf()) for name, mode in (modes | every).items()}
    return greedy | {"penalties": ("eagle3", MIXED_TREE, penalty)}


DECODING = build_decoding_modes()


def build_recorded_target():
    """Build a target of two layers: more of them have the same operators, and take as much longer to trace."""
    return tiny_target(seed=0, device=build_recording_device(), layers=2)


def build_recorded_draft(name, target):
    case = CASES[name]
    has_layers = getattr(case.conf, "layers", None) is not None
    return (replace(case, conf=replace(case.conf, layers=[0, 1])) if has_layers else case).build(target)


@pytest.fixture
def narrow_topk(monkeypatch):
    """Lower the limit of a top-k below the tiny vocabulary."""
    monkeypatch.setattr(operators, "MAX_TOPK_COLUMNS", 60)


def decode_prompts(decoder, batch, **options):
    decoder.decode([[1, 2, 3]] * batch, row_ids=range(batch), max_new_tokens=4, **options)


@recorded_graphs
@pytest.mark.usefixtures("narrow_topk")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("mode", DECODING)
def test_graphs_of_decoding_hold_only_operators_that_every_compiler_supports(mode, batch):
    name, shape, sampling = DECODING[mode]
    target = build_recorded_target()
    drafts = {None: lambda: None, "ngram": NgramDraft}
    draft = drafts.get(name, lambda: build_recorded_draft(name, target))()
    decoder = Decoder(target, draft, shape, sampling=sampling, slots=40, batch=batch)
    decode_prompts(decoder, batch)
    if batch == 1 and mode in ("autoregressive", "chain", "mixed"):  # timed phases are graphs with their own outputs
        decode_prompts(decoder, batch, phase_timer=PhaseTimer(synchronize=target.device.synchronize))
    assert "embedding" in list_operators()
    assert not find_forbidden()


@recorded_graphs
@pytest.mark.usefixtures("narrow_topk")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("shape", "verification"),
    [
        (NO_TREE, Verification.auto),
        (STATIC_TREE, Verification.auto),
        (MIXED_TREE, Verification.auto),
        (STATIC_TREE, Verification.rejection),
        (chain(2), Verification.block),
    ],
)
def test_graphs_of_sampling_have_neither_sorts_nor_infinities_nor_scatters_that_add_integers(
    shape, verification, batch
):
    target = build_recorded_target()
    draft = None if shape is NO_TREE else build_recorded_draft("eagle3", target)
    sampling = SamplingConf(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.1
    )
    rule = build_acceptance_rule(verification, sampling)
    decoder = Decoder(target, draft, shape, sampling=sampling, slots=40, acceptance_rule=rule, batch=batch)
    decode_prompts(decoder, batch)
    assert "scatter_add" in list_operators()
    assert not find_forbidden()


@recorded_graphs
@pytest.mark.parametrize("name", CASES)
def test_graphs_of_training_hold_only_operators_that_every_compiler_supports(name):
    target = build_recorded_target()
    draft = build_recorded_draft(name, target)
    batch = batch_of(draw_texts(*[LENGTH] * ROWS))
    seen = target.device.compile(run_target)(target, draft.needs.layers, batch)
    extras = draft.prepare_batch(batch, step=3, generators=build_generators(range(ROWS)))
    record_training(draft, target, batch, seen, extras)
    # The target, the draft, and a chunk of each term of the loss.
    assert len(GRAPHS) == 3 + CASES[name].conf.trains_target
    assert {"embedding", "mm"} <= list_operators()
    assert not find_forbidden()


def record_training(draft, target, batch, seen, extras):
    total = LossModule(draft, target.device, compiled=True)(batch, seen, extras).total
    with WatchedOperators(record_call):
        total.backward()


@recorded_graphs
@pytest.mark.parametrize("loss", LossName)
def test_graphs_of_every_loss_hold_only_operators_that_every_compiler_supports(loss):
    """This includes the likeliest tokens as teacher, and how they are found."""
    target = tiny_target(seed=0, padding=operators.MAX_TOPK_COLUMNS)
    draft = CASES["eagle3"].build(target, loss=loss)
    batch = batch_of(draw_texts(*[LENGTH] * ROWS))
    seen = run_target(target, draft.needs.layers, batch)
    device = build_recording_device()
    top = device.compile(TopKLogits.from_logits)(target.logits(seen.hidden), 4)
    evaluate = device.compile_part(evaluate_chunk)
    for teacher in (seen, replace(seen, topk=top)):
        compute_loss(draft.loss_terms(batch, teacher), evaluate).total.backward()
    assert len(GRAPHS) == 3
    assert not find_forbidden()


@recorded_graphs
def test_graphs_of_training_on_likeliest_tokens_take_features_that_the_draft_does_not_read():
    target = tiny_target(seed=0, device=build_recording_device())
    draft = CASES["eagle3"].build(target)
    batch = batch_of(draw_texts(*[LENGTH] * ROWS))
    seen = run_target(target, draft.needs.layers, batch)
    unread = torch.zeros_like(seen.hidden[..., :1])
    top = TopKLogits.from_logits(target.logits(seen.hidden), 4)
    record_training(draft, target, batch, replace(seen, hidden=unread, topk=top), {})
    assert not find_forbidden()


def test_the_list_of_forbidden_operators_finds_each_of_them(fresh_compiler):
    """Each rule has a function that breaks it, so that a rule which no longer matches anything is noticed."""
    values, ids = torch.rand(2, 3, 4), torch.arange(12).view(3, 4)
    cases = {
        "sort": lambda: values.sort(dim=-1, stable=True).indices,
        "top-k of more than two dimensions": lambda: values.topk(2).indices,
        "top-k of wide rows": lambda: torch.zeros(1, 16_385).topk(2).indices,
        "scatter_add of integers": lambda: ids.scatter_add(1, ids % 4, ids),
        "remainder of integers": lambda: ids % 3,
        "argmax of integers": lambda: ids.argmax(1),
        "tril": lambda: values.tril(),
        "gather of bools": lambda: (values > 0).gather(2, torch.zeros_like(values).long()),
        "shift of 64 bits": lambda: ids >> 2,
        "infinity in masked_fill": lambda: values.masked_fill(values > 0.5, -torch.inf),
        "size zero in slice": lambda: values[..., :0],
        "float64 in _to_copy": lambda: values.double(),
        "constant of the host": lambda: ids + torch.tensor([4, 3, 2, 1]),
    }
    for rule, function in cases.items():
        build_recording_device().compile(function)()
        assert rule in find_forbidden(), rule


# --- finite masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (64, 64), (5, 300)])
def test_a_finite_mask_hides_keys_bit_for_bit_as_an_infinite_mask_does(queries, keys, scale, dtype):
    """Values and gradients are equal, in PyTorch's attention and in the unrolled attention."""
    numbers = torch.Generator().manual_seed(0)
    query, key, value = (
        size * torch.randn(2, heads, length, 16, generator=numbers).to(dtype)
        for size, heads, length in ((scale, 4, queries), (1, 2, keys), (1, 2, keys))
    )
    mask = torch.rand(2, 1, queries, keys, generator=numbers) < 0.3
    mask[..., 0] = True
    forms = [lambda q, k, v: attend(q, k, v, mask)]
    if queries == keys:
        forms.append(lambda q, k, v: attend_unrolled(q, [k, 2 * k], [v, v + 1], mask))
    for form in forms:
        finite, infinite = (
            compute_with_gradients(form, query, key, value, score=score)
            for score in (attention.MASKED_SCORE, -torch.inf)
        )
        for actual, expected in zip(finite, infinite, strict=True):
            assert torch.equal(actual, expected)


def compute_with_gradients(form, *inputs, score):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASKED_SCORE", score)
        output = form(*leaves)
    output.float().square().sum().backward()
    return [output, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_training_attention_has_no_groups_of_heads(kv_heads):
    """CUDA's fused kernels take a mask and gradients, or groups, but not both."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 8, 16, requires_grad=True)
    key, value = torch.randn(2, 2, kv_heads, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    heads = []

    def record_heads(func, args, _):
        if "scaled_dot_product" in str(func) and "backward" not in str(func):
            heads.append((args[0].shape[1], args[1].shape[1]))

    with WatchedOperators(record_heads):
        attended = attend(query, key, value, mask)
    assert heads == [(4, 4)]  # of queries and of keys
    scores = query @ key.repeat_interleave(4 // kv_heads, 1).mT / 4
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = expected @ value.repeat_interleave(4 // kv_heads, 1)
    torch.testing.assert_close(attended, expected)
    with torch.no_grad():
        torch.testing.assert_close(attend(query, key, value, mask), expected)
