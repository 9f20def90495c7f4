"""Which sample goes to which rank."""

from __future__ import annotations

import pytest

from unidist.errors import UsageError
from unidist.training.sharding import Tail, check_tail, share

SIZES = [(12, 3), (13, 3), (2, 3), (0, 3), (5, 1)]


def everyone(count: int, size: int, tail: Tail, epoch: int = 0, shuffle: bool = True) -> list[list[int]]:
    return [share(count, rank=rank, size=size, seed=7, epoch=epoch, shuffle=shuffle, tail=tail) for rank in range(size)]


@pytest.mark.parametrize(("count", "size"), SIZES)
def test_join_deals_each_sample_out_once(count: int, size: int) -> None:
    shares = everyone(count, size, "join")
    assert sorted(sample for each in shares for sample in each) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("count", "size"), SIZES)
def test_pad_makes_shares_equal_and_leaves_nothing_out(count: int, size: int) -> None:
    shares = everyone(count, size, "pad")
    assert {len(each) for each in shares} == {-(-count // size)}
    assert {sample for each in shares for sample in each} == set(range(count))


@pytest.mark.parametrize(("count", "size"), SIZES)
def test_drop_makes_shares_equal_and_repeats_nothing(count: int, size: int) -> None:
    shares = everyone(count, size, "drop")
    samples = [sample for each in shares for sample in each]
    assert {len(each) for each in shares} == {count // size}
    assert len(set(samples)) == len(samples)


def test_each_epoch_has_its_own_order() -> None:
    assert everyone(20, 2, "pad", epoch=0) != everyone(20, 2, "pad", epoch=1)
    assert everyone(20, 2, "pad", epoch=1) == everyone(20, 2, "pad", epoch=1)
    assert everyone(6, 2, "pad", epoch=3, shuffle=False) == [[0, 2, 4], [1, 3, 5]]


def test_refuses_an_unknown_tail() -> None:
    with pytest.raises(UsageError, match="choices: pad, drop, join"):
        check_tail("cut")
