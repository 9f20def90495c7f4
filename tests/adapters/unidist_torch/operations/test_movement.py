"""Gradients of operations that move tensors, over some of the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unidist.torch as ud
from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


def test_the_gradient_of_an_allgather_over_a_process_set_is_that_of_the_own_rows(
    pool: Callable[..., RankPool],
) -> None:
    def on_rank() -> list[float]:
        some = ud.ProcessSet([1, 2])
        ud.init(process_sets=[some])
        try:
            if not some.included():
                return []
            own = torch.full((ud.rank(),), float(ud.rank()), requires_grad=True)  # 1 row of rank 1, 2 of rank 2
            (ud.allgather(own, process_set=some) * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
            return own.grad.tolist()
        finally:
            ud.shutdown()

    assert pool(3).run(on_rank) == [[], [10.0], [20.0, 30.0]]
