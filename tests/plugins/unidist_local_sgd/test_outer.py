"""The outer optimizers make the steps of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from unidist_second.framework import NumpyFramework

from unidist.buffer import Buffer
from unidist_arrays.memory import buffer_of_array
from unidist_local_sgd.outer import OuterKind, OuterOptimizer


@pytest.mark.parametrize(
    ("kind", "rate", "momentum"),
    [("average", 1.0, 0.0), ("sgd", 0.3, 0.0), ("momentum", 0.3, 0.8), ("nesterov", 0.7, 0.9)],
)
def test_steps_are_those_of_the_formulas(kind: OuterKind, rate: float, momentum: float) -> None:
    random = np.random.default_rng(3)
    outer = OuterOptimizer(kind, rate, momentum)
    start, speed = random.standard_normal(6), np.zeros(6)
    expected = start.copy()
    velocity: Buffer | None = buffer_of_array(speed) if outer.has_momentum else None
    expected_speed = np.zeros(6)
    for _ in range(4):
        gradient = random.standard_normal(6)
        expected_speed = momentum * expected_speed + gradient
        moved = {
            "average": gradient,
            "sgd": gradient,
            "momentum": expected_speed,
            "nesterov": gradient + momentum * expected_speed,
        }[kind]
        expected = expected - rate * moved
        outer.step(NumpyFramework(), buffer_of_array(start), buffer_of_array(gradient.copy()), velocity)
    assert np.max(np.abs(start - expected)) < 1e-14
