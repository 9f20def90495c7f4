"""Loaders whose batches fill a budget of tokens: each sample on one rank, from any position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from _loading import as_rank, continued, flat, samples
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from unidist.errors import UsageError
from unidist_torch.loading import ShardedLoader
from unidist_torch.training.data import shard

COUNT, BUDGET = 61, 40
LENGTHS = [random.Random(index).randrange(1, 20) for index in range(COUNT)]


def sharded(*, window: int | None = 20, lengths: Any = LENGTHS, **options: Any) -> ShardedLoader:
    """Return a loader of numbers of samples."""
    tail = options.pop("tail", "join")
    given = {"shuffle": True} | options
    loader: Any = DataLoader(torch.arange(COUNT), **given)
    return shard(loader, tail=tail, cost=lengths, max_tokens=BUDGET, window=window)


def epochs(rank: int, size: int, count: int = 2, **options: Any) -> list[list[list[int]]]:
    """Return the batches of the first epochs."""
    with as_rank(rank, size):
        loader = sharded(**options)
        return [samples(loader) for _ in range(count)]


def tokens(batch: list[int]) -> int:
    """Return the size of a batch with its padding."""
    return len(batch) * max(LENGTHS[index] for index in batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_is_on_one_rank_within_the_budget(size: int) -> None:
    alone = epochs(0, 1)
    everyone = [epochs(rank, size) for rank in range(size)]
    for epoch in range(2):
        batches = [batch for each in everyone for batch in each[epoch]]
        assert sorted(batches) == sorted(alone[epoch])
        assert sorted(flat(batches)) == list(range(COUNT))
        assert all(tokens(batch) <= BUDGET for batch in batches)
        for step in itertools.zip_longest(*(each[epoch] for each in everyone)):
            work = [tokens(batch) for batch in step if batch is not None]
            if alone[epoch][-1] not in step:
                assert max(work) - min(work) < max(LENGTHS)
    assert alone[0] != alone[1]


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_have_equally_many_batches_and_say_so(tail: str) -> None:
    for window in (None, 7):
        everyone = [epochs(rank, 3, tail=tail, window=window) for rank in range(3)]
        for epoch in range(2):
            assert len({len(each[epoch]) for each in everyone}) == 1
        with as_rank(1, 3):
            loader = sharded(tail=tail, window=window)
            assert len(loader) == len(everyone[1][0])
            for epoch in range(2):
                assert len(list(loader)) == len(loader) == len(everyone[1][epoch])


def test_a_batch_size_is_the_most_samples() -> None:
    assert max(len(batch) for batch in epochs(0, 1)[0]) > 3
    limited = epochs(0, 1, batch_size=3)[0]
    assert max(len(batch) for batch in limited) == 3
    assert sorted(flat(limited)) == list(range(COUNT))


def test_samples_that_are_not_shuffled_are_sorted_in_windows() -> None:
    for batches in epochs(0, 1, shuffle=False):
        assert batches == epochs(0, 1, shuffle=False)[0]
        assert max(batches[0]) < 20


def test_lengths_may_be_a_function_an_array_or_a_tensor() -> None:
    wanted = epochs(0, 2)
    for lengths in (np.array(LENGTHS), torch.tensor(LENGTHS), LENGTHS.__getitem__):
        assert epochs(0, 2, lengths=lengths) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_continues_exactly(workers: int) -> None:
    wanted = epochs(1, 2)[1]
    with as_rank(1, 2):
        before = sharded(num_workers=workers)
        list(before)
        read = iter(before)
        assert [next(read).tolist() for _ in range(3)] == wanted[:3]
        after = sharded(num_workers=workers)
        after.load_state_dict(before.state_dict())
        assert samples(after) == wanted[3:]


def test_a_state_continues_with_another_number_of_ranks() -> None:
    assert continued(sharded) == list(range(COUNT))


def test_a_state_of_other_batches_is_an_error() -> None:
    with as_rank(0, 2):
        loader = sharded()
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(
            UsageError, match=r"made of 20 samples at a time, and this loader has .* made of 21 samples"
        ):
            sharded(window=21).load_state_dict(state)
        other = sharded(lengths=[*LENGTHS[:-1], 1 if LENGTHS[-1] > 1 else 2])
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="draws other items in that epoch"):
            next(iter(other))


def test_ranks_with_other_lengths_are_an_error() -> None:
    gather = mock.patch("unidist.training.items.allgather_object", return_value=[1, 2])
    text = "has other lengths or arguments on rank 1 than on rank 0 in epoch 0"
    with as_rank(0, 2), gather, pytest.raises(UsageError, match=text):
        next(iter(sharded()))


def test_a_sampler_chooses_the_samples() -> None:
    sampler = WeightedRandomSampler([1.0] * 30 + [0.0] * 31, 200, generator=torch.Generator().manual_seed(3))
    with as_rank(0, 1):
        loader = sharded(sampler=sampler, shuffle=None)
        batches = samples(loader)
        with pytest.raises(TypeError, match="is not known before a sampler has drawn"):
            len(loader)
    assert len(flat(batches)) == 200
    assert max(flat(batches)) < 30
    assert all(tokens(batch) <= BUDGET for batch in batches)


class Stream(IterableDataset[int]):
    """Elements of a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (range(4), {"max_tokens": 9}, "give the lengths of the samples too, cost=lengths"),
        (range(4), {"window": 9}, "is about batches of max_tokens="),
        (range(4), {"max_tokens": 9, "cost": [1, 2, 3]}, "3 lengths of 4 samples"),
        (range(4), {"max_tokens": 2, "cost": [1, 2, 3, 1]}, "sample 2 has 3 tokens, and with max_tokens=2"),
        (Stream(), {"max_tokens": 9, "cost": len}, "of an IterableDataset, whose lengths are not known"),
    ],
)
def test_what_cannot_be_is_an_error(data: Any, options: dict[str, Any], text: str) -> None:
    with as_rank(0, 2), pytest.raises(UsageError, match=text):
        shard(DataLoader(data), **options)
