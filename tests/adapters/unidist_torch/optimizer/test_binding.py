"""A bound optimizer while its buckets are being tuned, and when it is not used any more."""

from __future__ import annotations

import csv
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import assert_close, runtime, share, values
from torch import nn

import unidist.torch as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
STEPS = 80


@contextmanager
def autotune(log: Path) -> Iterator[None]:
    """Settings of this rank's next runtime."""
    os.environ |= {"UNIDIST_AUTOTUNE": "1", "UNIDIST_AUTOTUNE_LOG": str(log)}
    try:
        with runtime():
            yield
    finally:
        del os.environ["UNIDIST_AUTOTUNE"], os.environ["UNIDIST_AUTOTUNE_LOG"]


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(192, 192) for _ in range(4))).double()


def train(model: nn.Module, optimizer: Any, rank: int, size: int, set_to_none: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(4, 192, generator=generator, dtype=torch.float64)
        optimizer.zero_grad(set_to_none=set_to_none)
        model(share(x, rank, size)).square().mean().backward()
        optimizer.step()
    return values(model)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("by_distribute", "set_to_none"), [(True, True), (False, False)])
def test_tuning_changes_buckets_on_all_ranks_alike_and_no_number(
    pool: Pool, tmp_path: Path, by_distribute: bool, set_to_none: bool
) -> None:
    def on_rank() -> tuple[list[torch.Tensor], set[int], bool]:
        with autotune(tmp_path / "log.csv"):
            model = network()
            if by_distribute:
                model, optimizer = ud.distribute(model, sgd(model))
            else:
                optimizer = ud.DistributedOptimizer(sgd(model))
            used = set()
            step = optimizer.step

            def noted() -> None:
                step()
                used.add(optimizer._unidist._update.bucket_bytes)

            optimizer.step = noted
            found = train(model, optimizer, ud.rank(), ud.size(), set_to_none)
            return found, used, optimizer._unidist._tuner is None

    wanted_model = network()
    wanted = train(wanted_model, sgd(wanted_model), 0, 1, set_to_none)
    (first, used, finished), (second, used_too, finished_too) = pool(2).run(on_rank)
    assert_close(first, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert used == used_too
    assert len(used) > 1
    assert finished
    assert finished_too
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert {int(row["bucket_bytes"]) for row in rows[1:]} <= used  # the first is the engine's, larger than the model
    assert rows[-1]["decision"].startswith("stay with")


def test_tuning_tries_cycle_times_where_ranks_pause(pool: Pool, tmp_path: Path) -> None:
    """Rank 1 has `other` under way when it comes to `both`, for which rank 0 waits: until then they disagree."""

    def on_rank() -> bool:
        with autotune(tmp_path / "log.csv"):
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model))
            for _ in range(1000):
                if ud.rank() == 1:
                    other = ud.allreduce_async(torch.ones(1), name="other")
                    time.sleep(0.002)
                ud.allreduce(torch.ones(1), name="both")
                if ud.rank() == 0:
                    other = ud.allreduce_async(torch.ones(1), name="other")
                ud.synchronize(other)
                optimizer.zero_grad()
                model(torch.ones(4, 192, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                if optimizer._unidist._tuner is None:
                    return True
            return False

    assert pool(2).run(on_rank) == [True, True]
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert len({row["cycle_time_ms"] for row in rows}) > 1
    assert len({row["bucket_bytes"] for row in rows}) > 1


def test_ranks_that_join_in_the_middle_of_tuning(pool: Pool, tmp_path: Path) -> None:
    def on_rank() -> float:
        with autotune(tmp_path / "log.csv"):
            weight = nn.Parameter(torch.zeros(1 << 17, dtype=torch.float64))
            optimizer = ud.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            for _ in range(10 + 30 * ud.rank()):
                optimizer.zero_grad()
                (-weight).sum().backward()
                optimizer.step()
            found = float(weight[0])
            ud.join()
            return found

    assert pool(2).run(on_rank) == [10.0, 25.0]


@pytest.mark.parametrize("op", [ud.Average, ud.Adasum])
def test_a_model_that_is_not_used_any_more_is_freed(pool: Pool, op: Any) -> None:
    def on_rank() -> bool:
        with runtime():
            model = nn.Linear(4, 4)
            optimizer = ud.DistributedOptimizer(sgd(model), op=op)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            alive = weakref.ref(model)
            del model, optimizer
        gc.collect()
        return alive() is None

    assert pool(2).run(on_rank) == [True, True]
