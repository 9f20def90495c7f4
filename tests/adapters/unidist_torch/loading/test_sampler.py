"""Samplers and batch samplers of every kind: each item on one rank, from any position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _loading import as_rank, continued, flat, samples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unidist.errors import UsageError
from unidist.mesh import SAMPLE_AXES, Mesh
from unidist.training.sharding import Tail
from unidist_torch.loading import ShardedLoader
from unidist_torch.training.data import shard

COUNT = 23


class Buckets(Sampler[list[int]]):
    """Batches of samples of about one length, as users write them: shuffled by Python's generator, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        buckets = [[index for index in range(COUNT) if index % 3 == bucket] for bucket in range(3)]
        for bucket in buckets:
            random.shuffle(bucket)
        batches = [bucket[start : start + 3] for bucket in buckets for start in range(0, len(bucket), 3)]
        random.shuffle(batches)
        yield from batches


class ByNumpy(Sampler[int]):
    """Draws with numpy's generator, and has no length."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(COUNT).tolist()


class EpochOrder(Sampler[int]):
    """Draws an order that depends on `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return COUNT


def subset() -> Any:
    return SubsetRandomSampler(range(3, 20), generator=torch.Generator().manual_seed(5))


LOADERS: dict[str, Any] = {
    "in order": {"batch_size": 2},
    "shuffled": {"batch_size": 2, "shuffle": True},
    "a subset": lambda: {"batch_size": 2, "sampler": subset()},
    "numpy": lambda: {"batch_size": 2, "sampler": ByNumpy()},
    "by epoch": lambda: {"batch_size": 2, "sampler": EpochOrder()},
    "a list": {"batch_size": 2, "sampler": list(range(COUNT - 1, -1, -1))},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "batches of a sampler": lambda: {"batch_sampler": BatchSampler(subset(), 3, drop_last=False)},
    "no batches": lambda: {"batch_size": None, "sampler": subset()},
    "batches as indices": lambda: {"batch_size": None, "sampler": Buckets()},
}
WITH_WORKERS = LOADERS | {
    "workers": lambda: {"batch_size": 2, "sampler": subset(), "num_workers": 2},
    "workers with buckets": lambda: {"batch_sampler": Buckets(), "num_workers": 2},
}


def loader(kind: str, **options: Any) -> ShardedLoader:
    given = WITH_WORKERS[kind]
    return shard(DataLoader(torch.arange(COUNT), **(given if isinstance(given, dict) else given())), **options)


def epochs(kind: str, rank: int, size: int, count: int = 2, **options: Any) -> list[list[list[int]]]:
    """Return the batches of the first epochs, with the script's generators in another state on each rank."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    with as_rank(rank, size):
        sharded = loader(kind, **options)
        return [samples(sharded) for _ in range(count)]


@pytest.mark.parametrize("kind", LOADERS)
def test_each_item_of_the_sequence_is_on_one_rank(kind: str) -> None:
    everyone = [epochs(kind, rank, 3, tail="join") for rank in range(3)]
    alone = epochs(kind, 0, 1, tail="join")
    for epoch in range(2):
        assert sorted(flat([batch for each in everyone for batch in each[epoch]])) == sorted(flat(alone[epoch]))
        assert len(set(flat(alone[epoch]))) == len(flat(alone[epoch])) > 15
    if kind not in ("in order", "a list"):
        assert alone[0] != alone[1]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_have_equally_many_batches(kind: str, tail: Tail) -> None:
    everyone = [epochs(kind, rank, 3, tail=tail) for rank in range(3)]
    for epoch in range(2):
        assert len({len(each[epoch]) for each in everyone}) == 1
        whole = set(flat(epochs(kind, 0, 1)[epoch]))
        found = flat([batch for each in everyone for batch in each[epoch]])
        assert set(found) <= whole
        assert set(found) == whole if tail == "pad" else len(set(found)) == len(found)


def test_whole_batches_go_round() -> None:
    alone = epochs("buckets", 0, 1)[0]
    assert [len(batch) for batch in alone] != [3] * 8
    first, second = (epochs("buckets", rank, 2, tail="join")[0] for rank in range(2))
    assert (first, second) == (alone[::2], alone[1::2])


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_a_state_continues_exactly(kind: str) -> None:
    for rank, steps in [(1, 3)] if "workers" in kind else itertools.product(range(2), range(4)):
        wanted = epochs(kind.removeprefix("workers with "), rank, 2)
        with as_rank(rank, 2):
            before = loader(kind)
            list(before)
            read = iter(before)
            assert [next(read).tolist() for _ in range(steps)] == wanted[1][:steps]
            state = before.state_dict()
            torch.manual_seed(99)
            after = loader(kind)
            after.load_state_dict(state)
            assert after.state_dict() == state
            assert samples(after) == wanted[1][steps:]
            wanted_next = epochs(kind.removeprefix("workers with "), rank, 2, count=3)[2]
        with as_rank(rank, 2):
            assert samples(after) == wanted_next


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_continues_with_another_number_of_ranks(kind: str) -> None:
    assert continued(lambda: loader(kind, tail="join")) == sorted(flat(epochs(kind, 0, 1)[0]))


def test_a_state_at_the_end_of_an_epoch() -> None:
    with as_rank(0, 2):
        sharded = loader("shuffled")
        for _ in sharded:
            state = sharded.state_dict()
        behind = sharded.state_dict()
        again = loader("shuffled")
        again.load_state_dict(state)
        assert samples(again) == []  # a loop over epochs counts this one
        assert again.state_dict() == behind
        assert (behind["epoch"], behind["processed"]) == (1, [])
        again.load_state_dict(state)
        again.set_epoch(0)  # as Lightning does; it is that epoch
        assert samples(again) == []
        again.set_epoch(0)
        assert samples(again) == epochs("shuffled", 0, 2)[0]


def test_a_state_of_other_samples_is_an_error() -> None:
    with as_rank(0, 2):
        state = loader("shuffled").state_dict()
        with pytest.raises(UsageError, match="seed=0, and this loader has 23 samples, shuffled with seed=3"):
            loader("shuffled", seed=3).load_state_dict(state)
        with pytest.raises(UsageError, match="this loader has 20 samples"):
            shard(DataLoader(torch.arange(20), 2, shuffle=True)).load_state_dict(state)
        sharded = loader("batches of a sampler")
        next(iter(sharded))
        state = sharded.state_dict()
        other = shard(DataLoader(torch.arange(COUNT), batch_sampler=BatchSampler(subset(), 4, drop_last=False)))
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="draws other items in that epoch"):
            next(iter(other))


def test_an_own_generator_keeps_its_seed() -> None:
    def first_epoch(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        sampler = WeightedRandomSampler([1.0] * COUNT, 50, generator=generator)
        with as_rank(0, 1):
            return flat(samples(shard(DataLoader(torch.arange(COUNT), 2, sampler=sampler))))

    plain = WeightedRandomSampler([1.0] * COUNT, 50, generator=torch.Generator().manual_seed(8))
    assert first_epoch(8) == list(plain) != first_epoch(9)


def test_random_samplers_that_are_no_plain_shuffling_are_asked() -> None:
    """With replacement, or of another number of samples: it was taken for a shuffled dataset."""
    with as_rank(0, 1):
        few = shard(DataLoader(torch.arange(COUNT), 1, sampler=RandomSampler(range(COUNT), num_samples=4)))
        assert len(flat(samples(few))) == len(few) == 4
        part = shard(DataLoader(torch.arange(COUNT), 1, sampler=SequentialSampler(range(5))))
        assert flat(samples(part)) == list(range(5))
        whole = shard(DataLoader(torch.arange(COUNT), 1, sampler=RandomSampler(range(5))), shuffle=False)
        assert flat(samples(whole)) == list(range(COUNT))


def test_lengths() -> None:
    for tail, wanted in (("pad", [4, 4]), ("drop", [4, 4]), ("join", [5, 4])):
        for rank in range(2):
            with as_rank(rank, 2):
                sampler = SubsetRandomSampler(range(17))
                sharded = shard(DataLoader(torch.arange(COUNT), 2, sampler=sampler), tail=tail)  # type: ignore[arg-type]
                assert len(sharded) == len(list(sharded)) == wanted[rank] + (tail == "pad")
    with as_rank(0, 2), pytest.raises(TypeError):
        len(loader("buckets"))


def test_a_sampler_without_end() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from torch.randperm(COUNT).tolist()

    def read(rank: int, size: int, steps: int) -> list[int]:
        with as_rank(rank, size):
            sharded = shard(DataLoader(torch.arange(COUNT), 1, sampler=Endless()))
            return flat(samples(itertools.islice(sharded, steps)))

    alone = read(0, 1, 100)
    assert [read(0, 2, 50), read(1, 2, 50)] == [alone[::2], alone[1::2]]


def test_costs_are_balanced_over_ranks() -> None:
    lengths = [1, 9, 1, 9, 1, 9, 1, 9, 5, 5]

    def read(rank: int, **options: Any) -> list[list[int]]:
        with as_rank(rank, 2):
            return samples(shard(DataLoader(torch.tensor(lengths), 4), **options))

    assert [[sum(batch) for batch in read(rank)] for rank in range(2)] == [[4, 5], [36, 5]]
    for cost in (lengths, lambda index: lengths[index]):
        balanced = [read(rank, cost=cost) for rank in range(2)]
        assert [[sum(batch) for batch in each] for each in balanced] == [[20, 5], [20, 5]]
        assert sorted(flat(balanced[0] + balanced[1])) == sorted(lengths)


def test_ranks_that_hold_parts_of_one_model_get_the_same_samples() -> None:
    mesh = Mesh({"data": None, "tensor": 2}, world_size=4)

    def read(rank: int) -> list[int]:
        with as_rank(mesh.place(SAMPLE_AXES, rank=rank), mesh.size(SAMPLE_AXES)):
            return flat(samples(shard(DataLoader(torch.arange(8), 2))))

    assert [read(rank) for rank in range(4)] == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
