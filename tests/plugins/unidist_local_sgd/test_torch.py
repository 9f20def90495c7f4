"""Local SGD in PyTorch gives the numbers of the published algorithms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import local_sgd_torch
from local_sgd_torch import Case
from part_pools import PartPools

pytestmark = pytest.mark.parallel

LIMIT = 1e-12
NESTEROV = Case(4, outer="nesterov", rate=0.7, optimizer="adamw")
CASES = [
    Case(1, optimizer="momentum"),
    Case(3),
    Case(4, optimizer="adamw", steps=10),
    NESTEROV,
    Case(5, outer="sgd", rate=0.5, optimizer="momentum"),
    Case(3, outer="momentum", rate=0.4, momentum=0.5, after=3, optimizer="adamw"),
    Case(4, after=5, optimizer="adamw"),
    Case(4, fragments=2, outer="nesterov", rate=0.7, steps=14),
    Case(5, fragments=3, delay=2, mix=0.5, outer="nesterov", rate=0.6, steps=17, optimizer="adamw"),
    Case(4, fragments=2, delay=1, steps=13, optimizer="momentum"),
    Case(3, outer="nesterov", rate=0.7, closure=True),
]


HOSTS = [
    Case(4, hosts=2, outer="nesterov", rate=0.7, optimizer="adamw"),
    Case(3, hosts=2, after=2, optimizer="momentum"),
]


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_come_to_the_numbers_of_copies_in_one_process(torch_pools: PartPools, size: int) -> None:
    found = torch_pools.get(size).run(local_sgd_torch.train, (CASES,))
    for number, case in enumerate(CASES):
        expected = local_sgd_torch.simulate(case, size)
        for rank in range(size):
            assert largest_difference(found[rank][number], expected[rank]) < LIMIT, (case, rank)


def test_ranks_of_a_host_train_together_and_hosts_synchronize(torch_pools: PartPools) -> None:
    found = torch_pools.get(4).run(local_sgd_torch.train, (HOSTS,))
    for number, case in enumerate(HOSTS):
        expected = local_sgd_torch.simulate(case, 4)
        for rank in range(4):
            assert largest_difference(found[rank][number], expected[rank]) < LIMIT, (case, rank)


SAVED = [
    replace(NESTEROV, steps=12),  # saved in the middle of a window
    Case(5, fragments=2, delay=2, mix=0.5, outer="nesterov", rate=0.6, steps=14, optimizer="momentum"),
    Case(4, optimizer="adamw", steps=12, synchronizes_before_save=True),
    Case(3, optimizer="adamw", steps=12),  # saved just after a synchronization
]


@pytest.mark.parametrize("number", range(len(SAVED)))
def test_a_resumed_training_is_the_one_that_went_on(torch_pools: PartPools, tmp_path: Path, number: int) -> None:
    case, size = SAVED[number], 2
    found = torch_pools.get(size).run(local_sgd_torch.save_and_resume, (case, str(tmp_path / "saved")))
    for undisturbed, resumed, step in found:
        assert step == case.steps
        assert largest_difference(resumed, undisturbed) == 0.0
    # and a job of another size, or with another strategy, loads it too
    alone, step = torch_pools.get(1).run(local_sgd_torch.load_and_train, (case, str(tmp_path / "saved")))[0]
    assert step == case.steps
    assert largest_difference(alone, found[0][0]) > 0
    plain = torch_pools.get(size).run(local_sgd_torch.load_and_train, (case, str(tmp_path / "saved"), "data"))
    assert largest_difference(plain[0][0], plain[1][0]) == 0.0


def test_a_checkpoint_of_data_parallel_training_is_loaded(torch_pools: PartPools, tmp_path: Path) -> None:
    case, folder = Case(1, optimizer="momentum", steps=12), str(tmp_path / "saved")
    expected = torch_pools.get(2).run(local_sgd_torch.save_plain, (case, folder))[0]
    for found, _ in torch_pools.get(2).run(local_sgd_torch.load_and_train, (case, folder)):
        assert largest_difference(found, expected) < LIMIT


def test_a_rank_steps_without_waiting_for_another(torch_pools: PartPools, tmp_path: Path) -> None:
    came_so_far = torch_pools.get(2).run(local_sgd_torch.step_one_after_another, (str(tmp_path),))
    assert came_so_far == [True, True]


def test_ranks_that_step_unequally_get_an_error(torch_pools: PartPools, tmp_path: Path) -> None:
    error, _ = torch_pools.get(2).run(local_sgd_torch.step_unequally, (str(tmp_path),))
    assert error.startswith("StalledError")
    assert "rank(s) 1" in error or "rank 1" in error
    assert "after its update 4" in error


def test_train_step_and_verification(torch_pools: PartPools) -> None:
    case = Case(3, steps=7)
    found = torch_pools.get(2).run(local_sgd_torch.train_with_train_step, (case.line(), case.steps))
    expected = local_sgd_torch.simulate(case, 2)
    for rank, (values, losses) in enumerate(found):
        assert largest_difference(values, expected[rank]) < LIMIT
        assert (losses == found[0][1]) == (rank == 0), "each rank has the loss of its own batch"


def test_a_synchronization_on_demand_makes_the_ranks_equal(torch_pools: PartPools) -> None:
    (has_synchronized, values), (_, others) = torch_pools.get(2).run(
        local_sgd_torch.synchronize_at_the_end, ("local_sgd=4",)
    )
    assert has_synchronized
    assert largest_difference(values, others) == 0.0
    assert torch_pools.get(1).run(local_sgd_torch.synchronize_at_the_end, ("data",))[0][0] is False


def test_outer_gradients_travel_compressed(torch_pools: PartPools) -> None:
    case = Case(4, outer="nesterov", rate=0.7, options=":compression=fp16")
    found = [each[0] for each in torch_pools.get(2).run(local_sgd_torch.train, ([case],))]
    for rank, expected in enumerate(local_sgd_torch.simulate(case, 2)):
        assert LIMIT < largest_difference(found[rank], expected) < 1e-3
    replayed = replace(case, steps=8)  # ends with a synchronization
    first, second = (each[0] for each in torch_pools.get(2).run(local_sgd_torch.train, ([replayed],)))
    assert largest_difference(first, second) == 0.0
