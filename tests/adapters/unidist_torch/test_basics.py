"""`seed`: different numbers for different samples, equal ones for the same. `device`: one for each rank."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from _training import runtime
from torch.utils.data import DistributedSampler, TensorDataset

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel
Pool = Callable[..., RankPool]


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [("", [0, 1, 2, 3]), ("tensor=2", [0, 0, 1, 1]), ("pipeline=2", [0, 1, 0, 1]), ("tensor=4", [0, 0, 0, 0])],
)
def test_random_numbers_differ_on_the_data_axis_alone(pool: Pool, strategy: str, groups: list[int]) -> None:
    def on_rank() -> tuple[float, ...]:
        with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
            ud.seed(7)
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(7)
    alone = (random.Random(7).random(), float(np.random.RandomState(7).rand()), float(torch.rand(())))
    drawn = pool(4, "shm").run(on_rank)
    assert drawn[0] == alone
    for kind in range(3):
        numbers = [each[kind] for each in drawn]
        assert len(set(numbers)) == len(set(groups))
        assert all(numbers[rank] == numbers[groups.index(group)] for rank, group in enumerate(groups))


def test_a_seed_is_not_negative(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(UsageError, match=r"seed\(-1\): give a number from 0"):
            ud.seed(-1)

    pool(1, "single").run(on_rank)


def test_a_sampler_over_all_ranks_of_a_divided_model_is_a_warning(pool: Pool) -> None:
    def on_rank() -> None:
        data = TensorDataset(torch.arange(8))
        divided = set_variables({"UNIDIST_STRATEGY": "tensor=2"})
        with divided, runtime(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            DistributedSampler(data, ud.data_size(), ud.data_rank())
            assert not found
            DistributedSampler(data, ud.size(), ud.rank())
            assert len(found) == (ud.rank() == 0)
            assert all("Use data_size() and data_rank()" in str(each.message) for each in found)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("visible", [0, 1, 2])
def test_each_rank_has_a_device_of_its_own(pool: Pool, visible: int) -> None:
    def on_rank() -> str:
        with pytest.MonkeyPatch.context() as patch, runtime():
            current: list[int] = []
            patch.setattr(torch.cuda, "device_count", lambda: visible)
            patch.setattr(torch.cuda, "set_device", current.append)
            try:
                device = ud.device()
                assert current == ([device.index] if visible else [])
                return str(device)
            except ConfigurationError as exc:
                return str(exc)

    found = pool(2, "shm").run(on_rank)
    if visible == 1:
        assert all("sees 1 CUDA device(s), and its host runs 2 ranks" in each for each in found)
    else:
        assert found == (["cuda:0", "cuda:1"] if visible else ["cpu", "cpu"])
