"""Noise from a hash of keys, in integers so small that every accelerator computes them exactly.

Accelerators may hold int64 as int32, and may add and multiply integers in fp32. So a word of 32 bits is two
limbs of 16 bits, low and high, in int32 tensors, and no sum or product exceeds 2^24, up to which fp32 is exact.
What has more than 32 bits, a seed or a row id, is cut on the host.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.device.device import Device
from models.device.graph_budget import GraphLedger
from models.io.errors import require
from models.trees.sampling_config import SamplingConf

Word = tuple[Any, Any]  # low and high limb: tensors, or integers of the host

LIMB_MASK = 0xFFFF
OUTER_SALT, INNER_SALT = 0x9E3779B9, 0x85EBCA6B
# The digits of base 256, lowest first, of 0x21F0AAAD and 0x735A2D97 (https://github.com/skeeto/hash-prospector).
# The third of the first is negative, as 0xF0 is 0x100 - 0x10: with it the sums of `_multiply_words` are below
# 13.4 million, those of the second multiplier below 15.9 million.
MULTIPLIER_DIGITS = ((0xAD, 0xAA, -0x10, 0x22), (0x97, 0x2D, 0x5A, 0x73))

# The results of `check_noise` in this process, by the device's name and whether it compiles.
_noise_checks: dict[tuple[str, bool], bool] = {}


def split_row_ids(row_ids: Sequence[int]) -> Int[Tensor, "batch limbs"]:
    """Return the four limbs of each row id, lowest first; ids count modulo 2^64."""
    return torch.tensor(
        [[row_id >> shift & LIMB_MASK for shift in (0, 16, 32, 48)] for row_id in row_ids], dtype=torch.int32
    )


def gumbel_noise(
    seed: int,
    row_limbs: Int[Tensor, "batch limbs"],
    round_start: int | Int[Tensor, " batch"],
    places: Int[Tensor, "batch places"],
    vocab_ids: Int[Tensor, " vocab"],
) -> Float[Tensor, "batch places vocab"]:
    """Return standard Gumbel noise of tokens at places, from a hash without state.

    `row_limbs` are those of `split_row_ids`. `vocab_ids` are target ids, so that a reduced draft vocabulary gets
    the target's noise. Seeds count modulo 2^64, round starts, places and vocabulary ids modulo 2^32.
    """
    # The largest values decide the sample. There `upper_tail` is small, where fp32 is precise.
    upper_tail = draw_uniform(seed, row_limbs, round_start, places, vocab_ids)
    return -torch.log(-torch.log1p(-upper_tail))


def uniform_noise(
    seed: int,
    row_limbs: Int[Tensor, "batch limbs"],
    round_start: int | Int[Tensor, " batch"],
    places: Int[Tensor, "batch places"],
) -> Float[Tensor, "batch places"]:
    """Return uniform numbers in (0, 1), a function of the arguments like `gumbel_noise`."""
    first_token = torch.zeros(1, dtype=torch.int32, device=places.device)
    return draw_uniform(seed, row_limbs, round_start, places, first_token)[..., 0]


def draw_uniform(
    seed: int,
    row_limbs: Int[Tensor, "batch limbs"],
    round_start: int | Int[Tensor, " batch"],
    places: Int[Tensor, "batch places"],
    vocab_ids: Int[Tensor, " vocab"],
) -> Float[Tensor, "batch places vocab"]:
    """Return uniform numbers in (0, 1) of tokens at places; the arguments are those of `gumbel_noise`."""
    # Two keys of 32 bits avoid collisions.
    (outer_low, inner_low), (outer_high, inner_high) = (
        limb[..., None].unbind(0) for limb in _derive_keys(seed, row_limbs, round_start, places)
    )
    vocab_low, vocab_high = _split_words(vocab_ids)
    low, high = _mix_words((inner_low ^ vocab_low, inner_high ^ vocab_high))
    low, high = _mix_words((outer_low ^ low, outer_high ^ high))
    # Both terms are exact, so that the sum is rounded once, as the conversion of an integer of 32 bits is.
    bits = high.float() * 2.0**16 + low.float()
    # The middles of 2^32 equal intervals; fp32 rounds the last ones to 1, so the clamp takes the
    # largest number below 1.
    return ((bits + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)


def check_noise(device: Device) -> bool:
    """Return whether the device draws the same numbers as a CPU, bit for bit, as graphs if it compiles."""
    round_starts = torch.tensor([0, 1, 4095, 2**31 - 8])
    arguments = (
        split_row_ids([0, 7, 2**31 - 1, 2**63 - 1]),
        round_starts,
        round_starts[:, None] + torch.arange(4),
        torch.arange(0, 2**18, 2**10) + 5,
    )
    own = replace(device, ledger=GraphLedger())  # This graph counts in no run's budget.
    seed = 2**50 - 1
    drawn = own.compile(draw_uniform)(seed, *(tensor.to(device.torch_device) for tensor in arguments))
    return torch.equal(drawn.cpu(), draw_uniform(seed, *arguments))


def require_equal_noise(sampling: SamplingConf, device: Device) -> None:
    """Raise UserError if tokens are sampled on a device whose noise is not a CPU's; check each device once."""
    if sampling.is_greedy or device.name == "cpu":
        return
    key = device.name, device.compiles
    if key not in _noise_checks:
        _noise_checks[key] = check_noise(device)
    require(
        _noise_checks[key],
        f"sampling.temperature: must be 0 on {device.name}, whose random numbers are not those of a CPU bit for bit, "
        f"got {sampling.temperature}; set it to 0 or use device=cpu",
    )


def _derive_keys(seed: int, row_limbs: Tensor, round_start: int | Tensor, places: Tensor) -> Word:
    """Return the outer and the inner key of each place: limbs of shape [2, batch, places]."""
    row_low, row_high = ((row_limbs[:, index], row_limbs[:, index + 1]) for index in (0, 2))
    outer, inner = (_add_words(_mix_seed(salt, seed), row_low) for salt in (OUTER_SALT, INNER_SALT))
    keys = _mix_words((torch.stack([outer[0], inner[0]]), torch.stack([outer[1], inner[1]])))
    keys = _mix_words(_add_words(keys, row_high))
    low, high = _mix_words(_add_words(keys, _split_words(round_start)))
    return _mix_words(_add_words((low[..., None], high[..., None]), _split_words(places)))


def _split_words(values: int | Tensor) -> Word:
    """Return the limbs of integers modulo 2^32."""
    if isinstance(values, Tensor):
        values = values.int()
    return values & LIMB_MASK, values >> 16 & LIMB_MASK


def _add_words(left: Word, right: Word) -> Word:
    """Return the sum modulo 2^32."""
    low = left[0] + right[0]
    return low & LIMB_MASK, left[1] + right[1] + (low >> 16) & LIMB_MASK


def _mix_seed(salt: int, seed: int) -> Word:
    """Hash both words of a seed into the first word of a key, in integers of the host."""
    first = _mix_words(_split_words(salt ^ seed))
    return _mix_words(_add_words(first, _split_words(seed >> 32)))


def _mix_words(word: Word) -> Word:
    """Hash words; the hash is bijective and has no visible bias."""
    low, high = word
    first, second = MULTIPLIER_DIGITS
    word = _xor_with_shifted(_multiply_words((low ^ high, high), first))
    return _xor_with_shifted(_multiply_words(word, second))


def _multiply_words(word: Word, digits: tuple[int, int, int, int]) -> Word:
    """Return the product modulo 2^32 with a multiplier, of which these are the digits."""
    low, high = word
    lowest = low * digits[0]
    lower = low * digits[1] + (lowest >> 8)  # in units of 2^8
    upper = (lower >> 8) + low * digits[2] + high * digits[0]  # in units of 2^16
    uppermost = low * digits[3] + high * digits[1]  # in units of 2^24
    return (lower & 0xFF) << 8 | lowest & 0xFF, upper + ((uppermost & 0xFF) << 8) & LIMB_MASK


def _xor_with_shifted(word: Word) -> Word:
    """Return `word ^ (word >> 15)`."""
    low, high = word
    return low ^ (high << 1 | low >> 15) & LIMB_MASK, high ^ high >> 15
