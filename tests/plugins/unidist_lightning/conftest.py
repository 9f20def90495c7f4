"""What the tests of Lightning share: runs on ranks, and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}
WHOLE = 60
"""Samples of 3 batches: divisible by 1, 2 and 3 ranks."""

Run = Callable[..., Any]


@pytest.fixture
def alone(rank_pool: RankPoolFactory) -> Run:
    """Train in one process by plain Lightning; returns what it found."""

    def run(**options: Any) -> dict[str, Any]:
        from lightning_runs import train

        found = rank_pool(2, env=ENVIRONMENT).run(
            lambda: train(WHOLE // 5, **options) if _is_first() else None  # 12 samples a batch
        )[0]
        assert isinstance(found, dict), found
        return found

    return run


@pytest.fixture
def answers(rank_pool: RankPoolFactory) -> Run:
    """Train on ranks; returns what each of them found, or the text of its error."""

    def run(line: str | None = None, num_ranks: int = 2, **options: Any) -> list[Any]:
        from lightning_runs import train_on_rank

        arguments = (WHOLE // 5 // num_ranks, line)
        return rank_pool(num_ranks, env=ENVIRONMENT).run(train_on_rank, arguments, options)

    return run


@pytest.fixture
def together(answers: Run) -> Run:
    """Train on ranks, which must all find the same; returns it."""

    def run(line: str | None = None, num_ranks: int = 2, **options: Any) -> dict[str, Any]:
        from lightning_runs import distance

        found = answers(line, num_ranks, **options)
        assert all(isinstance(each, dict) for each in found), found
        assert all(distance(each["state"], found[0]["state"]) == 0 for each in found)
        assert all(each["metrics"] == pytest.approx(found[0]["metrics"]) for each in found)
        assert found[0]["world_size"] == num_ranks
        first: dict[str, Any] = found[0]
        return first

    return run


def _is_first() -> bool:
    import os

    return os.environ.get("UNIDIST_RANK", os.environ.get("RANK", "0")) == "0"
