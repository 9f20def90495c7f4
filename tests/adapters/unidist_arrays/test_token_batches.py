"""Batches of a budget of tokens, of samples by number: each sample on one rank, as many batches on each."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
from data_ranks import as_rank

from unidist.errors import UsageError
from unidist_arrays.token_batches import EqualEpochs, TokenBatches

COUNT, BUDGET = 61, 40
LENGTHS = [random.Random(index).randrange(1, 20) for index in range(COUNT)]


class Numbers:
    """Samples that are their numbers."""

    def __init__(self, count: int = COUNT, *, makes_arrays: bool = True) -> None:
        self.count, self.makes_arrays = count, makes_arrays

    def batch(self, indices: list[int]) -> list[int]:
        return list(indices)


def batches_of(samples: Numbers | None = None, **options: Any) -> TokenBatches:
    """Return the batches of this rank."""
    chosen: dict[str, Any] = {"cost": LENGTHS, "max_tokens": BUDGET, "max_samples": None, "window": 20}
    chosen |= {"shuffle": True, "seed": 0, "tail": "pad"} | options
    return TokenBatches.of(samples or Numbers(), **chosen)


def epochs(rank: int, size: int, count: int = 3, **options: Any) -> list[list[list[int]]]:
    """Return a rank's batches of the first epochs."""
    with as_rank(rank, size):
        batches = batches_of(**options)
        return [list(batches) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_is_in_the_batch_of_one_rank(size: int) -> None:
    alone = epochs(0, 1)
    everyone = [epochs(rank, size, tail="join") for rank in range(size)]
    for epoch in range(3):
        batches = [batch for rank in everyone for batch in rank[epoch]]
        assert sorted(batches) == sorted(alone[epoch])
        assert sorted(itertools.chain(*batches)) == list(range(COUNT))
        assert all(len(batch) * max(LENGTHS[index] for index in batch) <= BUDGET for batch in batches)
    assert alone[0] != alone[1]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_have_equally_many_batches_and_say_so(size: int, tail: str) -> None:
    for window in (None, 7):
        everyone = [epochs(rank, size, tail=tail, window=window) for rank in range(size)]
        for epoch in range(3):
            assert len({len(rank[epoch]) for rank in everyone}) == 1
        with as_rank(1, size):
            batches = batches_of(tail=tail, window=window)
            for epoch in range(3):
                assert len(list(batches)) == len(batches) == len(everyone[1][epoch])


def test_an_epoch_can_be_chosen() -> None:
    with as_rank(1, 2):
        batches = batches_of()
        batches.set_epoch(2)
        assert list(batches) == epochs(1, 2)[2]


def test_samples_that_are_not_shuffled_are_the_same_in_each_epoch() -> None:
    first, second, _ = epochs(0, 1, shuffle=False)
    assert first == second
    assert max(first[0]) < 20


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_epochs_are_the_same_batches_without_a_gap(size: int) -> None:
    for rank in range(size):
        wanted = list(itertools.chain(*epochs(rank, size, count=8, window=7)))
        with as_rank(rank, size):
            equal = EqualEpochs(batches_of(window=7), tail="pad")
            taken = [list(equal) for _ in range(6)]
            assert len({len(equal), *map(len, taken)}) == 1
            assert list(itertools.chain(*taken)) == wanted[: 6 * len(equal)]
            equal.set_epoch(2)
            assert (equal.epoch, list(equal), equal.epoch) == (2, taken[2], 3)


def test_epochs_of_the_data_differ_in_length() -> None:
    """Else `EqualEpochs` would not be needed, nor be seen by the test above."""
    assert len(set(map(len, epochs(0, 1, count=8, window=7)))) > 1


def test_lengths_that_are_rounded_up_give_few_shapes() -> None:
    """A compiler that makes a program for each shape then makes one for each length, and one for an epoch's last."""
    rounded = [-(-length // 5) * 5 for length in LENGTHS]
    for batches in epochs(0, 1, cost=rounded):
        shapes = {(len(batch), max(rounded[index] for index in batch)) for batch in batches}
        assert len(shapes) <= len(set(rounded)) + 1


def test_equal_epochs_need_as_many_batches_on_each_rank() -> None:
    with as_rank(0, 2):
        with pytest.raises(UsageError, match=r"tail='join'.* use tail='pad' or 'drop'"):
            EqualEpochs(batches_of(tail="join"), tail="join")
        with pytest.raises(UsageError, match="fewer batches than the 2 ranks"):
            EqualEpochs(batches_of(tail="drop", max_tokens=10**6), tail="drop")
        with pytest.raises(UsageError, match="give collate="):
            EqualEpochs(batches_of(Numbers(makes_arrays=False)), tail="pad")


def test_no_samples_are_no_batches() -> None:
    with as_rank(1, 2):
        batches = batches_of(Numbers(0), cost=[])
        assert (list(batches), len(batches)) == ([], 0)
        with pytest.raises(UsageError, match="fewer batches"):
            EqualEpochs(batches, tail="pad")


def test_ranks_with_other_lengths_or_arguments_are_an_error() -> None:
    given = []

    def gather(operations: object, value: int, name: str) -> list[int]:
        given.append(value)
        return [value, value]

    with as_rank(0, 2), mock.patch("unidist.training.items.allgather_object", gather):
        for options in ({}, {"cost": [*LENGTHS[:-1], LENGTHS[-1] + 1]}, {"max_tokens": 41}, {"window": 9}, {"seed": 1}):
            batches_of(**options)
        batches_of()
    assert len(set(given[:-1])) == 5
    assert given[-1] == given[0]
    gather_other = mock.patch("unidist.training.items.allgather_object", return_value=[1, 2])
    with as_rank(0, 2), gather_other, pytest.raises(UsageError, match="other lengths or arguments on rank 1 than on"):
        batches_of()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cost": None}, "give the lengths of the samples too, cost=lengths"),
        ({"cost": [1, 2]}, "2 lengths of 61 samples"),
        ({"max_tokens": 0}, "max_tokens=0: give a number above 0"),
        ({"max_tokens": 5}, r"sample \d+ has \d+ tokens, and with max_tokens=5 no batch has room"),
        ({"max_samples": 0}, "batch_size=0: give at least 1"),
    ],
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any], text: str) -> None:
    with as_rank(0, 2), pytest.raises(UsageError, match=text):
        batches_of(**options)
