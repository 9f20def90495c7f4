"""What the tests of transformers share: runs on ranks, and alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}
WHOLE = 4
"""Samples of a batch, on all ranks together."""

Run = Callable[..., Any]


@pytest.fixture
def alone(rank_pool: RankPoolFactory) -> Run:
    """Train in one process by transformers' own Trainer; returns what it found."""

    def run(**options: Any) -> dict[str, Any]:
        from transformers_runs import train_alone

        found = rank_pool(2, env=ENVIRONMENT).run(lambda: train_alone(WHOLE, **options) if _is_first() else None)[0]
        assert isinstance(found, dict), found
        return found

    return run


@pytest.fixture
def answers(rank_pool: RankPoolFactory) -> Run:
    """Train on ranks; returns what each of them found, or the text of its error."""

    def run(line: str | None = None, num_ranks: int = 2, batch_size: int = 0, **options: Any) -> list[Any]:
        from transformers_runs import train_on_rank

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = (port, batch_size or WHOLE // num_ranks, line)
        return rank_pool(num_ranks, env=ENVIRONMENT).run(train_on_rank, arguments, options)

    return run


@pytest.fixture
def together(answers: Run) -> Run:
    """Train on ranks, which must all find the same; returns it."""

    def run(line: str | None = None, num_ranks: int = 2, **options: Any) -> dict[str, Any]:
        from transformers_runs import distance

        found = answers(line, num_ranks, **options)
        assert all(isinstance(each, dict) for each in found), found
        assert all(distance(each["state"], found[0]["state"]) == 0 for each in found)
        assert all(each["losses"] == pytest.approx(found[0]["losses"], abs=1e-15) for each in found)
        first: dict[str, Any] = found[0]
        return first

    return run


def _is_first() -> bool:
    import os

    return os.environ.get("UNIDIST_RANK", os.environ.get("RANK", "0")) == "0"
