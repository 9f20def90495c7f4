"""Stochastic rounding of float32 to bfloat16, by numbers that depend on an element's place alone.

A value between two neighbours becomes the upper one with the probability of its distance to the lower one, so the
mean of many roundings is the value: updates that are far smaller than the distance of the neighbours are not lost, as
they are where each is rounded to the nearest.
"""

from __future__ import annotations

import torch

from unidist.optim.rounding_key import HASH_FACTORS, RoundingKey

_PART = 1 << 16  # elements at a time: what is computed on the way stays in the caches of a CPU
_PART_ON_DEVICE = 1 << 22


def round_stochastically(wide: torch.Tensor, target: torch.Tensor, key: RoundingKey, start: int = 0) -> None:
    """Round float32 values to bfloat16. NaN and infinities stay what they are.

    Args:
        wide: float32, `(n,)`; it is overwritten.
        target: bfloat16, `(n,)`.
        key: of the parameter, the step and the use.
        start: index of the first element in the whole parameter.
    """
    size = _PART if wide.is_cpu else _PART_ON_DEVICE
    for part, result in zip(torch.split(wide, size), torch.split(target, size), strict=True):
        noise = random_bits(part.numel(), key, start, part.device)
        start += part.numel()
        bits = part.view(torch.int32)
        # The upper 16 bits are the bfloat16 towards zero, the lower ones the distance from it.
        rounded = noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32)
        if part.sum().isnan():  # takes a tenth of the time of looking at each; some NaN would become zero
            rounded = torch.where(part.isnan(), part, rounded)
        result.copy_(rounded)


def random_bits(count: int, key: RoundingKey, start: int, device: torch.device) -> torch.Tensor:
    """Return `count` evenly distributed numbers of 16 bits, as int32; those of neighbours are independent."""
    golden, first, second = (_signed(factor) for factor in HASH_FACTORS)
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.mul_(golden).add_(_signed(start * golden + key.first))
    _fold(bits, 16).mul_(first).bitwise_xor_(_signed(key.second))
    _fold(bits, 13).mul_(second)
    return bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _fold(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """XOR the numbers with their own upper bits, shifted down."""
    return bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(number: int) -> int:
    """Return the int32 with the bits of a number; those above 32 are left out."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
