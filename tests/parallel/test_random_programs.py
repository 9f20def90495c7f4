"""Random programs over the engines shm and gloo give what numpy gives, and a lost rank is noticed at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from random_programs import check_losses, check_programs

from unidist.testing import PoolCache
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 30
    while not set(os.listdir("/dev/shm")) <= before:  # other processes may have files there for a while
        assert time.monotonic() < deadline, "files are left in shared memory"
        time.sleep(0.05)


def test_programs_over_shm(rank_pool: RankPoolFactory) -> None:
    check_programs(rank_pool, "shm", sizes=(3,), examples=8)


def test_losses_over_shm(rank_pool: RankPoolFactory) -> None:
    check_losses(rank_pool, "shm", sizes=(3,), examples=3)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_many_programs(rank_pool: RankPoolFactory, engine: str) -> None:
    if engine == "gloo":
        pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
    check_programs(rank_pool, engine, sizes=(1, 2, 3, 4, 8) if engine == "shm" else (2, 3), examples=200)


@pytest.mark.soak
def test_many_losses_over_shm() -> None:
    with PoolCache() as own:
        check_losses(own.get, "shm", sizes=(2, 3, 4), examples=30)


@pytest.mark.soak
def test_many_losses_over_gloo() -> None:
    pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
    with PoolCache() as own:  # an operation that gloo forgot holds its group until its timeout
        check_losses(own.get, "gloo", sizes=(2, 3, 4), examples=30, aborts=False, leaves_nothing=False, bound_sec=75.0)
