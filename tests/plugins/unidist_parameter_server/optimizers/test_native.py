"""Rules in C give the bits of those in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_parameter_server.native import IS_BUILT
from unidist_parameter_server.optimizers import (
    Adagrad,
    Adam,
    AddDifference,
    FlatStep,
    Momentum,
    Rule,
    Velocity,
    apply_native,
    native_rules,
)

pytestmark = pytest.mark.skipif(not IS_BUILT, reason="built without a C compiler")

Array = np.ndarray[Any, Any]
FRACTION = st.floats(0.01, 0.99)
SOME = st.just(0.0) | FRACTION
RULES = st.one_of(
    st.builds(AddDifference),
    st.builds(Momentum, FRACTION, momentum=SOME, dampening=SOME, nesterov=st.booleans(), weight_decay=SOME),
    st.builds(Velocity, FRACTION, momentum=SOME, nesterov=st.booleans(), weight_decay=SOME),
    st.builds(
        Adagrad,
        FRACTION,
        rate_decay=SOME,
        epsilon=FRACTION,
        epsilon_in_root=st.booleans(),
        weight_decay=SOME,
        decoupled=st.booleans(),
    ),
    st.builds(
        Adam,
        FRACTION,
        beta1=FRACTION,
        beta2=FRACTION,
        epsilon=FRACTION,
        epsilon_hat=st.booleans(),
        weight_decay=SOME,
        decoupled=st.booleans(),
        bias1=st.none() | FRACTION,
        bias2=st.none() | FRACTION,
    ),
)


@given(RULES, st.sampled_from(["float32", "float64"]), st.integers(0, 70), st.integers(1, 5), SOME | st.just(1.0))
def test_the_bits_of_numpy(rule: Rule, dtype: str, count: int, updates: int, factor: float) -> None:
    chance = np.random.default_rng(count)
    first, change = (chance.standard_normal(count).astype(dtype) for _ in range(2))
    slots = [np.abs(chance.standard_normal(count)).astype(dtype) for _ in rule.slots]
    scratch = np.empty(count, dtype), np.empty(count, dtype)
    expected, expected_slots = first.copy(), [slot.copy() for slot in slots]
    rule.apply(FlatStep(first, expected, change, slots, expected_slots, updates, factor, scratch))
    before = change.copy()
    assert apply_native(rule, FlatStep(first, first, change, slots, slots, updates, factor, scratch))
    assert np.array_equal(first, expected)
    assert all(np.array_equal(slot, other) for slot, other in zip(slots, expected_slots, strict=True))
    assert np.array_equal(change, before)


@pytest.mark.parametrize("rule", [Momentum(0.1), Velocity(0.1, nesterov=True)])
def test_descent_without_momentum_needs_no_slot(rule: Rule) -> None:
    values, expected, scratch = np.arange(5.0), np.empty(5), (np.empty(5), np.empty(5))
    rule.apply(FlatStep(values, expected, values, [], [], 1, 1.0, scratch))
    none: list[Array] = []
    assert apply_native(rule, FlatStep(values, values, values.copy(), none, none, 1, 1.0, scratch))
    assert np.array_equal(values, expected)


@dataclass(frozen=True)
class Halved(Momentum):
    """A rule of somebody else."""

    def apply(self, step: FlatStep) -> None:
        """Ignore the gradient."""
        np.multiply(step.values, 0.5, out=step.new_values)


def test_what_is_not_in_c_is_left_to_numpy() -> None:
    values, other, scratch = np.ones(3), np.ones(3), (np.empty(3), np.empty(3))
    none: list[Array] = []
    assert not apply_native(Halved(0.1), FlatStep(values, values, values, none, none, 1, 1.0, scratch))
    assert not apply_native(Momentum(0.1), FlatStep(values, other, values, none, none, 1, 1.0, scratch)), "elsewhere"
    assert native_rules([Momentum(0.1), Halved(0.1)], 1) is None
    assert native_rules([Adam(0.1)], 1) is None, "it needs two slots"


def test_parameters_of_a_group_have_one_rule() -> None:
    first, second = Momentum(0.1, nesterov=True), Adam(0.2)
    rules = native_rules([first, second, first], 2)
    assert rules is not None
    assert rules.numbers.tolist() == [0, 1, 0]
    assert rules.table[0].tolist()[1:6] == [0.1, 0.0, 0.0, 1.0, 0.0]
