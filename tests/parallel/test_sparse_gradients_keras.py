"""Keras' optimizers take each occurrence of a row of an embedding by itself, with sharded state as in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in Keras")

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

import _keras_sparse as training
from _keras_sparse import Case

pytestmark = pytest.mark.parallel

CASES = [
    Case("zero=1", "adam", "fit"),
    Case("zero=2", "adagrad", "eager"),
    Case("zero=1:bucket_mb=0.00005", "rmsprop", rare=True),
    Case("zero=2", "adam", "eager", rare=True, built=True),
    Case("zero=2", "adafactor"),
    Case("zero=1:whole=true", "adamax", "eager", rare=True),
    Case("zero=1", "lamb"),
    Case("zero=1", "adam", options=(("clipnorm", 0.01),)),
    Case("zero=2:whole=true", "adam", options=(("clipnorm", 0.01),)),
    Case("zero=2", "sgd", options=(("global_clipnorm", 0.01),), rare=True),
    Case("zero=1", "sgd", options=(("clipvalue", 0.001),)),
    Case("zero=1", "scaled"),
    Case("zero=2,accumulate=2", "adam", passes=2),
    Case("zero=1,accumulate=2", "adagrad", "eager", rare=True, passes=2),
]


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def _error(found: list[Any], expected: list[Any]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def test_sharded_state_has_the_numbers_of_one_process(tensorflow_pools: PartPools) -> None:
    (expected,) = tensorflow_pools.get(1).run(training.alone, (CASES,))
    for rank, found in enumerate(tensorflow_pools.get(2).run(training.trained, (CASES,))):
        for case, one, other in zip(CASES, found, expected, strict=True):
            assert _error(one, other) <= 1e-12, (case, rank)


def test_sums_of_rows_give_other_numbers_and_are_taken_where_a_script_asks_for_them(
    tensorflow_pools: PartPools,
) -> None:
    first = Case("zero=1:sparse=dense", "adam")
    cases = [
        replace(first, strategy=each)
        for each in (first.strategy, "zero=2:sparse=dense", "parameter_server=sync:sparse=dense")
    ]
    found = tensorflow_pools.get(2).run(training.trained, (cases,))[0]
    (expected,) = tensorflow_pools.get(1).run(training.alone, (cases[:1],))
    assert _error(found[0], expected[0]) > 1e-4
    assert max(_error(found[0], each) for each in found) <= 1e-12


def test_what_can_only_take_sums_of_rows_refuses(tensorflow_pools: PartPools) -> None:
    cases = [Case(line, "adam") for line in ("zero=3", "parameter_server=sync", "parameter_server=sync:push=delta")]
    assert tensorflow_pools.get(2).run(training.refused, (cases,)) == [None, None]
