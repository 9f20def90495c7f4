"""Streams: each element on one rank and one worker, from any position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _loading import as_rank, continued, flat, samples
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unidist.errors import UsageError
from unidist.training.sharding import Tail
from unidist_torch.loading import ShardedLoader
from unidist_torch.training.data import shard

COUNT = 23


class Whole(IterableDataset[torch.Tensor]):
    """The same elements in each worker, in another order in each epoch."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting = list(range(self.count))
        while waiting:
            yield torch.tensor(waiting.pop(random.randrange(len(waiting))))


class Parts(IterableDataset[torch.Tensor]):
    """Gives each worker its own part, as PyTorch's documentation says; the order depends on `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(COUNT))
        random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        own = order if info is None else order[info.id :: info.num_workers]
        yield from map(torch.tensor, own)


class Ranges(IterableDataset[torch.Tensor]):
    """Its part is set by a `worker_init_fn`."""

    def __init__(self) -> None:
        self.start, self.end = 0, COUNT

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(torch.tensor, range(self.start, self.end))


def set_range(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.start, info.dataset.end = (0, 9) if info.id == 0 else (9, COUNT)


class Late(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        info: Any = get_worker_info()
        yield info.id


LOADERS: dict[str, Any] = {
    "no worker": (Whole, {"batch_size": 2}),
    "one worker": (Parts, {"batch_size": 2, "num_workers": 1}),
    "two workers": (Whole, {"batch_size": 2, "num_workers": 2}),
    "workers with parts": (Parts, {"batch_size": 2, "num_workers": 2}),
    "workers that persist": (Whole, {"batch_size": 2, "num_workers": 2, "persistent_workers": True}),
    "persistent with parts": (Parts, {"batch_size": 2, "num_workers": 2, "persistent_workers": True}),
    "init function": (Ranges, {"batch_size": 2, "num_workers": 2, "worker_init_fn": set_range}),
    "elements": (Whole, {"batch_size": None}),
    "drop_last": (Whole, {"batch_size": 3, "drop_last": True, "num_workers": 2}),
}
WITH_PARTS = ("workers with parts", "persistent with parts", "init function")


def loader(kind: str, **options: Any) -> ShardedLoader:
    make, given = LOADERS[kind]
    return shard(DataLoader(make(), **given), **options)


def epochs(kind: str, rank: int, size: int, count: int = 2, **options: Any) -> list[list[Any]]:
    torch.manual_seed(rank)
    random.seed(rank)
    with as_rank(rank, size):
        sharded = loader(kind, **options)
        return [samples(sharded) for _ in range(count)]


@pytest.mark.parametrize("kind", LOADERS)
def test_each_element_is_on_one_rank_and_one_worker(kind: str) -> None:
    everyone = [epochs(kind, rank, 2, tail="join") for rank in range(2)]
    for epoch in range(2):
        found = flat([batch for each in everyone for batch in each[epoch]])
        if kind == "drop_last":
            assert len(set(found)) == len(found) == 21  # 12 and 9 of 12 and 11
        else:
            assert sorted(found) == list(range(COUNT))
    if kind != "init function":
        assert everyone[0][0] != everyone[0][1]


@pytest.mark.parametrize("kind", ["no worker", "workers with parts", "elements", "drop_last"])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_have_equally_many_batches(kind: str, tail: Tail) -> None:
    everyone = [epochs(kind, rank, 3, count=1, tail=tail)[0] for rank in range(3)]
    assert len({len(each) for each in everyone}) == 1
    found = flat([batch for each in everyone for batch in each])
    if kind != "drop_last":
        assert set(found) == set(range(COUNT)) if tail == "pad" else len(set(found)) == len(found)


def test_workers_that_read_the_same_make_the_batches_of_one() -> None:
    alone = epochs("no worker", 1, 2)
    assert epochs("two workers", 1, 2) == alone == epochs("workers that persist", 1, 2)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_continues_exactly(kind: str) -> None:
    wanted = epochs(kind, 1, 2, count=3)
    with as_rank(1, 2):
        before = loader(kind)
        list(before)
        read = iter(before)
        assert [next(read).tolist() for _ in range(3)] == wanted[1][:3]
        state = before.state_dict()
        after = loader(kind)
        after.load_state_dict(state)
        assert after.state_dict() == state
        rest = samples(after)
        assert sorted(flat(rest)) == sorted(flat(wanted[1][3:]))
        if kind not in WITH_PARTS:  # of which another worker may come first
            assert rest == wanted[1][3:]
        assert samples(after) == wanted[2]
        before.load_state_dict(state)  # also in a loader that has been used
        assert samples(before) == rest


@pytest.mark.parametrize("kind", ["no worker", "two workers", "workers with parts", "elements"])
def test_a_state_continues_with_another_number_of_ranks(kind: str) -> None:
    assert continued(lambda: loader(kind, tail="join")) == list(range(COUNT))


def test_an_init_function_gives_workers_their_parts() -> None:
    (batches,) = epochs("init function", 0, 1, count=1)
    assert sorted(flat(batches)) == list(range(COUNT))
    assert all(max(batch) < 9 or min(batch) >= 9 for batch in batches), "of one worker"


def test_a_state_of_parts_needs_as_many_workers() -> None:
    with as_rank(0, 2):
        sharded = loader("workers with parts")
        next(iter(sharded))
        state = sharded.state_dict()
        with pytest.raises(UsageError, match=r"num_workers=1\. Give it num_workers=2"):
            loader("one worker").load_state_dict(state)
        state["processed"] = [4]
        sharded.load_state_dict(state)
        with pytest.raises(UsageError, match="read in 1 parts"):
            next(iter(sharded))


def test_a_dataset_that_asks_for_its_worker_too_late_is_an_error() -> None:
    with as_rank(0, 1):
        sharded = shard(DataLoader(Late(), 2, num_workers=2))
        with pytest.raises(UsageError, match="Late asked get_worker_info"):
            list(sharded)
        assert len(list(shard(DataLoader(Whole(), 2)))) == 12


def test_random_draws_of_a_stream_leave_the_script_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    random.seed(4)
    before = random.getstate()
    with as_rank(0, 1):
        read = iter(loader("no worker"))
        next(read)  # for which PyTorch draws a seed for workers
        torch.manual_seed(3)
        next(read)
    assert torch.equal(torch.rand(3), wanted)
    assert random.getstate() == before


def test_lengths() -> None:
    for tail, wanted in (("pad", [6, 6]), ("drop", [6, 6]), ("join", [6, 6])):
        for rank in range(2):
            with as_rank(rank, 2):
                sharded = loader("no worker", tail=tail)
                assert len(sharded) == len(list(sharded)) == wanted[rank]
    with as_rank(0, 2), pytest.raises(TypeError):
        len(shard(DataLoader(Parts(), 2)))


def test_costs_of_elements_are_balanced_over_ranks() -> None:
    def read(rank: int) -> list[int]:
        with as_rank(rank, 2):
            sharded = shard(DataLoader(Whole(8), 4), cost=float)
            return [int(batch.sum()) for batch in sharded]

    assert read(0) == read(1) == [14]
