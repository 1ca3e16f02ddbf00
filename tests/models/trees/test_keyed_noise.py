"""Noise is Gumbel, keyed, and independent of batch, shape and device; its bits are those of a hash in int64."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from infer.engine.decode import Decoder
from models.device.device import Device
from models.io.errors import UserError
from models.trees.keyed_noise import check_noise, draw_uniform, gumbel_noise, split_row_ids, uniform_noise
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import tiny_target
from tests.support.models.watching import WatchedOperators

ROWS = 20_000
EXACT_IN_FP32 = 2**24  # the largest number up to which fp32 holds every integer
SUMS_AND_PRODUCTS = ("add", "sub", "mul")
EDGES = [0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
WIDE_EDGES = [*EDGES, 2**32, 2**48 - 1, 2**48 - 1 + (3 << 48), 2**63 - 1, -1, -(2**63)]


# --- the plain form ---------------------------------------------------------------------------


UINT32_MASK = 0xFFFFFFFF


def draw_by_int64(seed, row_ids, round_start, places, vocab_ids):
    """Draw the numbers of `draw_uniform`, in which every word is an int64."""
    outer, inner = (
        hash_key(start, seed, row_ids, round_start, places)[..., None] for start in (0x9E3779B9, 0x85EBCA6B)
    )
    bits = mix_bits(outer ^ mix_bits(inner ^ (vocab_ids & UINT32_MASK)))
    return ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)


def hash_key(start, seed, row_ids, round_start, places):
    key = torch.full_like(row_ids, start ^ (seed & UINT32_MASK))
    for word in (seed >> 32, row_ids, row_ids >> 32, round_start):
        key = mix_bits(key) + word & UINT32_MASK
    return mix_bits(mix_bits(key)[:, None] + places & UINT32_MASK)


def mix_bits(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * 0x21F0AAAD & UINT32_MASK
    bits = bits ^ (bits >> 15)
    bits = bits * 0x735A2D97 & UINT32_MASK
    return bits ^ (bits >> 15)


def draw_by_limbs(seed, row_ids, *more):
    return draw_uniform(seed, split_row_ids(row_ids.tolist()), *more)


def draw_arguments(numbers, *, rows=4, places=5, vocab=25_000):
    """Draw a seed of 50 bits, row ids of 64, round starts and places of 31, and neighboring tokens."""
    positions = torch.randint(0, 2**31, (rows, places + 1), generator=numbers)
    return (
        int(torch.randint(0, 2**50, (), generator=numbers)),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=numbers),
        positions[:, 0],
        positions[:, 1:],
        torch.arange(vocab) + torch.randint(0, 2**20, (), generator=numbers),
    )


@pytest.mark.no_shapes
def test_limbs_draw_the_numbers_of_int64_bit_by_bit_ten_million_times():
    numbers, count = torch.Generator().manual_seed(0), 0
    while count < 10_000_000:
        arguments = draw_arguments(numbers)
        drawn, expected = draw_by_limbs(*arguments), draw_by_int64(*arguments)
        assert torch.equal(drawn, expected), arguments[0]
        count += drawn.numel()


@pytest.mark.no_shapes
def test_limbs_draw_the_numbers_of_int64_at_the_edges_of_their_words():
    """A negative number counts modulo the size of its word, as it does in int64."""
    row_ids, edges = torch.tensor(WIDE_EDGES), torch.tensor([*EDGES, -1, -(2**31)])
    places = edges.expand(len(row_ids), -1)
    starts = [*EDGES, -1, edges[torch.arange(len(row_ids)) % len(edges)]]
    for seed, start in itertools.product(WIDE_EDGES, starts):
        arguments = seed, row_ids, start, places, edges
        assert torch.equal(draw_by_limbs(*arguments), draw_by_int64(*arguments)), (seed, start)


def test_uniform_numbers_are_those_of_the_first_token():
    seed, row_ids, start, places, _ = draw_arguments(torch.Generator().manual_seed(0))
    expected = draw_by_int64(seed, row_ids, start, places, torch.zeros(1, dtype=torch.int64))[..., 0]
    assert torch.equal(uniform_noise(seed, split_row_ids(row_ids.tolist()), start, places), expected)


# --- devices ----------------------------------------------------------------------------------


def test_no_integer_of_the_hash_has_64_bits_or_exceeds_what_fp32_holds():
    """Shifts, which a device may fill with zeros or with the sign, have no negative number either."""
    seed, row_ids, start, places, vocab_ids = draw_arguments(torch.Generator().manual_seed(0))
    row_limbs, largest = split_row_ids(row_ids.tolist()), []

    def watch(func, args, output):
        name = func.overloadpacket.__name__
        assert all(tensor.dtype in (torch.int32, torch.float32) for tensor in tree_leaves(output)), name
        if name in SUMS_AND_PRODUCTS and output.dtype is torch.int32:
            largest.append(int(output.abs().max()))
        if "shift" in name:
            assert int(args[0].min()) >= 0

    with WatchedOperators(watch):
        gumbel_noise(seed, row_limbs, start, places, vocab_ids)
        uniform_noise(seed, row_limbs, 7, places)
    assert EXACT_IN_FP32 / 2 < max(largest) <= EXACT_IN_FP32


class AlteredArithmetic(TorchDispatchMode):
    """Hold int64 as int32, and compute sums and products of integers in a type of floats."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in SUMS_AND_PRODUCTS and not output.is_floating_point():
            floats = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.dtype), args)
            output = func(*floats, **(kwargs or {})).to(output.dtype)
        is_wide = isinstance(output, torch.Tensor) and output.dtype is torch.int64
        return output.int().long() if is_wide else output


@dataclass(kw_only=True)
class SimulatedAccelerator(Device):
    """A CPU under another name, whose integers are computed as `mode` says."""

    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    compiles: bool = False
    mode: Any
    compiled_names: list[str] = field(default_factory=list)

    def compile(self, function, **_):
        self.compiled_names.append(function.__name__)

        def run(*args):
            with self.mode:
                return function(*args)

        return run


def test_a_device_that_computes_narrow_integers_in_fp32_draws_the_numbers_of_a_cpu():
    """The int64 form does not: its products are rounded."""
    mode = AlteredArithmetic(torch.float32)
    assert check_noise(SimulatedAccelerator(name="narrow", mode=mode))
    arguments = draw_arguments(torch.Generator().manual_seed(0), vocab=100)
    with mode:
        narrow = draw_by_int64(*arguments)
    assert not torch.equal(narrow, draw_by_int64(*arguments))


def test_sampling_is_refused_on_a_device_that_draws_other_numbers_and_greedy_decoding_is_not():
    device = SimulatedAccelerator(name="faulty", mode=AlteredArithmetic(torch.bfloat16))
    target = tiny_target(seed=0, device=device)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^sampling\.temperature: must be 0 on faulty, .*, got 0\.7; .*=cpu$"):
            Decoder(target, sampling=SamplingConf(temperature=0.7), slots=32)
    assert device.compiled_names.count("draw_uniform") == 1  # one check for all decoders of the process
    Decoder(target, sampling=SamplingConf(), slots=32)


@pytest.mark.no_shapes
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.system)])
def test_the_hash_is_a_single_graph_that_draws_the_same_numbers(backend, fresh_compiler):
    compiled = torch.compile(draw_uniform, backend=backend, fullgraph=True, dynamic=False)
    seed, row_ids, *more = draw_arguments(torch.Generator().manual_seed(0))
    row_limbs = split_row_ids(row_ids.tolist())
    assert torch.equal(compiled(seed, row_limbs, *more), draw_by_int64(seed, row_ids, *more))


# --- distribution and keys --------------------------------------------------------------------


def draw_noise(rows=ROWS, *, vocab=12, count=2, seed=0, turn=0, first_row=0):
    """Draw the noise of `count` positions of many rows."""
    positions = torch.arange(7, 7 + count).expand(rows, -1)
    row_limbs = split_row_ids(range(first_row, first_row + rows))
    return gumbel_noise(seed, row_limbs, turn, positions, torch.arange(vocab))


def test_noise_follows_the_gumbel_distribution_far_into_its_tail():
    noise = draw_noise(vocab=50, count=1).flatten()
    assert stats.kstest(noise.double(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert noise.isfinite().all()
    tail = noise[noise > 7]  # 24 bits of a uniform number near 1 would leave few values there
    assert stats.kstest(tail.double() - 7, stats.expon.cdf).pvalue > 1e-3
    assert len(tail.unique()) > 0.99 * len(tail)


@pytest.mark.parametrize("what", ["positions", "rows", "turns", "seeds", "high bits of the row"])
def test_noise_of_neighbouring_keys_is_independent(what):
    if what == "positions":
        pair = draw_noise().unbind(1)
    elif what == "rows":
        pair = draw_noise(ROWS + 1, count=1)[:, 0].unfold(0, 2, 1).unbind(-1)
    elif what == "high bits of the row":
        pair = [draw_noise(count=1, first_row=i << 32)[:, 0] for i in (0, 1)]
    else:
        pair = [draw_noise(count=1, **{what[:-1]: value})[:, 0] for value in (0, 1)]
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    first, second = ((logits + noise[:, 3:7]).argmax(-1) for noise in pair)
    counts = (first * 4 + second).bincount(minlength=16)
    joint = torch.outer(logits.exp(), logits.exp()).flatten().double()
    assert stats.chisquare(counts, len(first) * joint / joint.sum()).pvalue > 1e-3


def test_noise_of_neighbouring_tokens_is_independent():
    noise = draw_noise(count=1, vocab=8)[:, 0]
    correlation = torch.corrcoef(noise.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / ROWS**0.5


def test_noise_depends_on_the_key_and_not_on_the_batch():
    everything = draw_noise(6, count=4, vocab=30)
    rows, tokens = torch.tensor([4, 1]), torch.tensor([3, 29, 0])
    positions = torch.tensor([[9, 7], [10, 8]])
    part = gumbel_noise(0, split_row_ids(rows.tolist()), 0, positions, tokens)
    expected = everything[rows[:, None], positions - 7][..., tokens]
    torch.testing.assert_close(part, expected, atol=1e-6, rtol=1e-6)


def test_a_turn_may_differ_by_row():
    positions = torch.tensor([[7], [7]])
    both = gumbel_noise(0, split_row_ids([0, 0]), torch.tensor([0, 3]), positions, torch.arange(12))
    torch.testing.assert_close(both[0], draw_noise(1, count=1)[0])
    torch.testing.assert_close(both[1], draw_noise(1, count=1, turn=3)[0])
