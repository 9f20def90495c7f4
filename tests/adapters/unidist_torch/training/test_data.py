"""`shard` for PyTorch's DataLoader."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _loading import as_rank
from _training import runtime
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist_torch.training.data import shard

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def loader(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_each_sample_on_one_rank_in_every_epoch(pool: Pool) -> None:
    def on_rank() -> list[list[int]]:
        with runtime():
            sharded = shard(loader(7, shuffle=True), tail="join")
            return [[int(sample) for (batch,) in sharded for sample in batch] for _ in range(3)]

    everyone = pool(2).run(on_rank)
    epochs = [tuple(everyone[0][epoch] + everyone[1][epoch]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) == 3


def test_keeps_order_and_tells_its_length(pool: Pool) -> None:
    def on_rank() -> tuple[list[int], int]:
        with runtime():
            sharded = shard(loader(5))
            return [int(sample) for (batch,) in sharded for sample in batch], len(sharded)

    assert pool(2).run(on_rank) == [([0, 2, 4], 2), ([1, 3, 0], 2)]


def test_ranks_whose_samplers_differ_are_an_error_on_each(pool: Pool) -> None:
    def on_rank() -> list[int]:
        with runtime():
            torch.manual_seed(ud.rank())  # of the script; it is not asked
            same = shard(loader(8, sampler=WeightedRandomSampler([1.0] * 8, 6)))
            found = [int(sample) for (batch,) in same for sample in batch]
            generator = torch.Generator().manual_seed(ud.rank())
            other = shard(loader(8, sampler=SubsetRandomSampler(range(8), generator=generator)))
            with pytest.raises(UsageError, match=r"draws other items on rank 1 than on rank 0 in epoch 0"):
                next(iter(other))
            return found

    found = pool(2).run(on_rank)
    assert [len(each) for each in found] == [3, 3]


def test_batches_that_are_read_ahead_are_the_same(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            samples = loader(10, shuffle=True)
            plain, ahead = shard(samples), shard(samples).prefetch(3)
            for _ in range(3):
                assert [batch.tolist() for (batch,) in ahead] == [batch.tolist() for (batch,) in plain]
            assert len(ahead) == len(plain) == 3
            for _ in ahead:
                break
            with pytest.raises(UsageError, match=r"prefetch\(0\)"):
                shard(samples).prefetch(0)

    pool(2).run(on_rank)


def test_the_state_of_batches_that_are_read_ahead_is_that_of_training() -> None:
    asked: list[int] = []

    class Noted(Dataset[int]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    with as_rank(0, 2):
        ahead = shard(DataLoader(Noted(), 2, shuffle=True)).prefetch(3)
        read = iter(ahead)
        next(read)
        next(read)
        until = time.monotonic() + 30
        while len(asked) < 8 and time.monotonic() < until:
            time.sleep(0.01)
        state = ahead.state_dict()
        assert (len(asked) >= 8, state["processed"]) == (True, [8])
        rest = [batch.tolist() for batch in read]
        ahead.load_state_dict(state)
        assert [batch.tolist() for batch in ahead] == rest
        assert len(rest) == 3
        ahead.set_epoch(0)
        assert len(list(ahead)) == 5


def test_a_checkpoint_holds_the_state_for_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    def train(steps: int | None) -> list[int]:
        with runtime():
            model: Any = torch.nn.Linear(1, 1)
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            sampler = SubsetRandomSampler(range(23), generator=torch.Generator().manual_seed(2))
            sharded = shard(DataLoader(torch.arange(23), batch_size=2, sampler=sampler), tail="join")
            if steps is None:
                sharded.load_state_dict(ud.load(str(tmp_path), model, optimizer).extra["loader"])
            found = [batch.tolist() for batch in itertools.islice(sharded, steps)]
            if steps is not None:
                ud.save(str(tmp_path), model, optimizer, step=1, extra={"loader": sharded.state_dict()})
            return [sample for batch in found for sample in batch]

    seen = [*pool(2).run(train, [2]), *pool(3).run(train, [None])]
    assert [len(each) for each in seen] == [4, 4, 5, 5, 5]
    assert sorted(itertools.chain(*seen)) == list(range(23))


def test_a_loader_may_be_made_before_init() -> None:
    sharded = shard(loader(5, sampler=[1, 0]))
    with as_rank(0, 1):
        assert [batch.tolist() for (batch,) in sharded] == [[1, 0]]


def test_batches_in_no_order_have_no_state() -> None:
    with as_rank(0, 1), pytest.raises(UsageError, match="in_order=False"):
        shard(loader(5, num_workers=1, in_order=False)).state_dict()


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": 2, "sampler": [2, 0, 1]}])
def test_a_loader_that_is_made_again_with_another_sampler_is_an_error(options: dict[str, Any]) -> None:
    """As Lightning does; each rank trained on a part of its part."""
    with as_rank(1, 2):
        made: Any = shard(DataLoader(torch.arange(4), **options))
        given = {"order": made.order} if hasattr(made, "order") else {}
        sampler = DistributedSampler(made.dataset, 2, 1)
        with pytest.raises(
            UsageError, match=r"with DistributedSampler instead of the sampler .*\(rank 3\).*use_distributed"
        ):
            type(made)(shards=made.shards, dataset=made.dataset, batch_size=2, sampler=sampler, **given)


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a list": (lambda: [1, 2], {}, r"shard\(\) of a list \(rank 3\): .*DataLoader\(data, batch_size=32"),
    "a dataset": (lambda: TensorDataset(torch.arange(3)), {}, r"of a TensorDataset .*DataLoader\(data"),
    "a generator": (lambda: (each for each in range(3)), {}, r"of a generator .*IterableDataset"),
    "a stream": (Numbers, {}, r"of a Numbers .*IterableDataset"),
    "twice": (lambda: shard(loader(5)), {}, r"loader that shard\(\) has made"),
    "divided before": (lambda: loader(5, sampler=DistributedSampler(range(5), 2, 0)), {}, "DistributedSampler"),
    "a tail": (lambda: loader(5), {"tail": "cut"}, "choices: pad, drop, join"),
    "a stream to shuffle": (lambda: DataLoader(Numbers()), {"shuffle": True}, "its order is its own"),
    "costs of a stream": (lambda: DataLoader(Numbers()), {"cost": [1, 2]}, "a function of an element"),
    "batches to shuffle": (
        lambda: DataLoader(range(4), batch_sampler=[[1]]),
        {"shuffle": True},
        "with a batch_sampler",
    ),  # type: ignore[arg-type]
    "costs of batches": (
        lambda: DataLoader(range(4), batch_sampler=[[1]]),
        {"cost": [1]},
        "go to one rank as they are",
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_says_what_it_cannot_divide(case: str) -> None:
    make, options, message = WRONG[case]
    with as_rank(1, 2), pytest.raises(UsageError, match=message):
        shard(make(), **options)
