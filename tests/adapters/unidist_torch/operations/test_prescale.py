"""`prescale_factor` multiplies each rank's own input, before anything is added up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from _training import runtime

import unidist.torch as ud
from unidist.errors import MismatchError
from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel
_HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
HALVES = {"op": ud.Sum, "prescale_factor": 0.5}


@pytest.fixture(
    params=[
        "shm",
        "gloo",
        pytest.param("horovod", marks=pytest.mark.skipif(not _HAS_HOROVOD, reason="Horovod is not installed")),
    ]
)
def two_ranks(request: pytest.FixtureRequest, pool: Callable[..., RankPool]) -> RankPool:
    return pool(2, request.param)


def test_every_form_of_allreduce_scales_the_inputs(two_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            # Scaled after the sum it would be [3, -5, 7].
            given, wanted = torch.tensor([3, -5, 7]), torch.tensor([2, -4, 6])
            assert torch.equal(ud.allreduce(given, **HALVES), wanted)
            assert torch.equal(ud.synchronize(ud.allreduce_async(given, **HALVES)), wanted)
            for result in (*ud.grouped_allreduce([given, given], **HALVES),):
                assert torch.equal(result, wanted)
            assert torch.equal(given, torch.tensor([3, -5, 7]))
            changed = [given.clone() for _ in range(4)]
            ud.allreduce_(changed[0], **HALVES)
            ud.synchronize(ud.allreduce_async_(changed[1], **HALVES))
            ud.grouped_allreduce_(changed[2:], **HALVES)
            for result in changed:
                assert torch.equal(result, wanted)
            strided = torch.tensor([[3, 0], [-5, 0], [7, 0]])
            ud.allreduce_(strided[:, 0], **HALVES)
            assert torch.equal(strided, torch.tensor([[2, 0], [-4, 0], [6, 0]]))

    two_ranks.run(on_rank)


def test_every_form_of_reducescatter_scales_the_inputs(two_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            given = torch.tensor([3, -5])
            wanted = torch.tensor([2, -4])[ud.rank() :][:1]
            assert torch.equal(ud.reducescatter(given, **HALVES), wanted)
            assert torch.equal(ud.synchronize(ud.reducescatter_async(given, **HALVES)), wanted)
            for result in ud.grouped_reducescatter([given, given], **HALVES):
                assert torch.equal(result, wanted)
            assert torch.equal(given, torch.tensor([3, -5]))

    two_ranks.run(on_rank)


@pytest.mark.parametrize(
    ("value", "dtype"), [(3e38, torch.float32), (60000.0, torch.float16), (3e38, torch.bfloat16)], ids=str
)
def test_sums_that_would_overflow_do_not(two_ranks: RankPool, value: float, dtype: torch.dtype) -> None:
    def on_rank() -> None:
        with runtime():
            given = torch.full((2,), value, dtype=dtype)
            assert torch.equal(ud.allreduce(given, **HALVES), given)
            assert torch.equal(ud.reducescatter(given, **HALVES), given[:1])
            average = ud.allreduce(given, prescale_factor=0.5, postscale_factor=2.0)
            assert torch.equal(average, given)

    two_ranks.run(on_rank)


def test_ranks_that_give_different_factors_are_told(pool: Callable[..., RankPool]) -> None:
    def on_rank() -> None:
        with runtime():
            # The products are the same; the sums need not be.
            factors = (0.5, 1.0) if ud.rank() == 0 else (1.0, 0.5)
            with pytest.raises(MismatchError, match=r"prescale 0\.5"):
                ud.allreduce(torch.ones(3), prescale_factor=factors[0], postscale_factor=factors[1])

    pool(2, "shm").run(on_rank)
