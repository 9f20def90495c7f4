"""Local SGD in Keras gives the numbers of the published algorithms, however a step is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import local_sgd_keras
from local_sgd_keras import Case
from part_pools import PartPools

pytestmark = pytest.mark.parallel

LIMIT = 1e-12
DILOCO = "local_sgd=4:outer=nesterov:outer_lr=0.7:outer_momentum=0.8"
CASES = [
    Case("local_sgd=1", 1),
    Case("local_sgd=3", 3, mode="function", optimizer="adam"),
    Case(DILOCO, 4, rate=0.7, momentum=0.8, mode="fit", optimizer="adam"),
    Case(f"{DILOCO}:after=3", 4, after=3, rate=0.7, momentum=0.8),
    Case(
        "local_sgd=4:outer=sgd:outer_lr=0.5:fragments=2:delay=1:mix=0.25",
        4, rate=0.5, parts=((0,), (1, 2)), delay=1, mix=0.25, mode="function", optimizer="adam", steps=11,
    ),
]  # fmt: skip


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_come_to_the_numbers_of_copies_in_one_process(tensorflow_pools: PartPools, size: int) -> None:
    expected = tensorflow_pools.get(1).run(local_sgd_keras.simulate, (CASES, size))[0]
    found = tensorflow_pools.get(size).run(local_sgd_keras.train, (CASES,))
    for number, case in enumerate(CASES):
        for rank in range(size):
            assert largest_difference(found[rank][number], expected[number][rank]) < LIMIT, (case, rank)


def test_a_resumed_training_is_the_one_that_went_on(tensorflow_pools: PartPools, tmp_path: Path) -> None:
    case = Case(DILOCO, 4, mode="function", optimizer="adam", steps=12)
    for undisturbed, resumed in tensorflow_pools.get(2).run(
        local_sgd_keras.save_and_resume, (case, str(tmp_path / "saved"))
    ):
        assert largest_difference(resumed, undisturbed) == 0.0


def test_moving_averages_of_variables_are_averaged_over_the_ranks(tensorflow_pools: PartPools) -> None:
    first, second = tensorflow_pools.get(2).run(local_sgd_keras.fit_with_moving_averages)
    assert largest_difference(first, second) == 0.0


def test_a_tape_without_an_optimizer_is_refused(tensorflow_pools: PartPools) -> None:
    [error] = tensorflow_pools.get(1).run(local_sgd_keras.differentiate)
    assert "strategy 'local_sgd' brings its own updates, and a tape cannot" in error
