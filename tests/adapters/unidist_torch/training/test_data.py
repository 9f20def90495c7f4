"""`shard` for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _training import runtime
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.mesh import Mesh
from unidist.topology import Topology
from unidist_torch.training import data
from unidist_torch.training.data import shard

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def loader(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


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


def test_says_what_it_cannot_deal_out(pool: Pool) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    def on_rank() -> None:
        with runtime():
            with pytest.raises(UsageError, match="IterableDataset"):
                shard(DataLoader(Endless()))
            with pytest.raises(UsageError, match="say shuffle="):
                shard(loader(5, sampler=torch.utils.data.SubsetRandomSampler([1, 2])))
            with pytest.raises(UsageError, match="choices: pad, drop, join"):
                shard(loader(5), tail="cut")  # type: ignore[arg-type]  # that is the point

    pool(2).run(on_rank)


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


def test_ranks_that_hold_parts_of_one_model_get_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh({"data": None, "tensor": 2}, world_size=4)

    def samples(rank: int) -> list[int]:
        runtime = SimpleNamespace(
            topology=Topology(rank, 4, rank, 4),
            axis_rank=lambda axis: mesh.place(axis, rank=rank),
            axis_size=mesh.size,
        )
        monkeypatch.setattr(data.context, "current", lambda: runtime)
        return list(data.ShardSampler(range(8), shuffle=False))

    assert [samples(rank) for rank in range(4)] == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
