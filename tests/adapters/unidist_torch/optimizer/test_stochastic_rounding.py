"""Stochastic rounding: to a neighbour, right in the mean, and the same for an element whoever rounds it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from unidist.optim.rounding_key import RoundingKey
from unidist_torch.optimizer.stochastic_rounding import random_bits, round_stochastically

CPU = torch.device("cpu")


def rounded(values: torch.Tensor, *names: object, start: int = 0) -> torch.Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values.clone(), target, RoundingKey.of(*names), start)
    return target


def test_a_value_becomes_one_of_its_neighbours_and_is_right_in_the_mean() -> None:
    below, above = 1.0, 1.0078125  # neighbours in bfloat16
    for sign in (1, -1):
        for share in (0.1, 0.5, 0.9):
            values = torch.full((200_000,), sign * (below + share * (above - below)))
            found = rounded(values, "a", sign, share).float() * sign
            assert set(found.unique().tolist()) == {below, above}
            assert abs(found.eq(above).float().mean().item() - share) < 0.005


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    values = torch.randn(70_000).bfloat16()
    values[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.0e38, 1e-40])
    assert torch.equal(rounded(values.float(), 1).view(torch.int16), values.view(torch.int16))
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(nans, 1).isnan().all()


def test_an_element_is_rounded_alike_in_whichever_part_it_is() -> None:
    values = torch.randn(150_000)
    whole = rounded(values, 3, 7, "exp_avg")
    parts = [(0, 10), (10, 99_999), (99_999, 150_000)]
    cut = [rounded(values[begin:end], 3, 7, "exp_avg", start=begin) for begin, end in parts]
    assert torch.equal(torch.cat(cut), whole)
    for other in ((4, 7, "exp_avg"), (3, 8, "exp_avg"), (3, 7, "exp_avg_sq")):
        assert not torch.equal(rounded(values, *other), whole)


def test_the_numbers_are_even_independent_and_never_change() -> None:
    """A version that draws others would not go on with a checkpoint as the job that wrote it."""
    key = RoundingKey.of("weight", 3)
    assert key == (3094706352, 3244459143)
    assert random_bits(4, key, 0, CPU).tolist() == [31845, 3698, 54961, 51220]
    assert random_bits(2, key, (1 << 32) + 1, CPU).tolist() == random_bits(2, key, 1, CPU).tolist()
    bits = random_bits(1 << 20, key, 5, CPU)
    assert bits.min() >= 0
    assert bits.max() < 1 << 16
    counts = torch.bincount(bits >> 8, minlength=256).double()
    assert ((counts - 4096) ** 2 / 4096).sum() < 340  # chi squared, 255 degrees of freedom: 1 in 10000
    centred = bits.double() - bits.double().mean()
    for other in (
        centred.roll(1),
        centred.roll(64),
        random_bits(1 << 20, RoundingKey.of("weight", 4), 5, CPU) - 32768.0,
    ):
        assert abs((centred * other).mean() / centred.square().mean()) < 0.005
