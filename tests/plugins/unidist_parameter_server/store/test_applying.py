"""A change is applied to the contents of a shard in place as it is to other memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unidist.buffer import DType
from unidist_parameter_server.optimizers import Adagrad, Adam, AddDifference, Momentum, Rule, Velocity
from unidist_parameter_server.store.applying import apply_change
from unidist_parameter_server.store.memory import ShardContents
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut

Array = np.ndarray[Any, Any]
COUNT = 64
(SHARD,) = cut(
    [FlatMemory(DType.FLOAT64, COUNT, (ParameterSlot(0, 0, 20), ParameterSlot(1, 24, 16), ParameterSlot(2, 40, 24)))],
    1 << 20,
)
RULES: list[Rule] = [
    AddDifference(),
    Momentum(0.1, weight_decay=0.1),
    Momentum(0.1, momentum=0.9),
    Momentum(0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    Momentum(0.1, momentum=0.9, nesterov=True),
    Velocity(0.1, weight_decay=0.1),
    Velocity(0.1, momentum=0.9),
    Velocity(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    Adagrad(0.1, weight_decay=0.1, rate_decay=0.1),
    Adagrad(0.1, epsilon_in_root=True, decoupled=True, weight_decay=0.1, epsilon=1e-3),
    Adam(0.1, weight_decay=0.1),
    Adam(0.1, weight_decay=0.1, decoupled=True, epsilon_hat=True, bias1=0.8),
]


def contents_of(rule: Rule, seed: int | None) -> ShardContents:
    """Return random contents, of which the last piece has been updated more often; or not-a-number without a seed."""

    def array() -> Array:
        return np.full(COUNT, np.nan) if seed is None else np.abs(chance.standard_normal(COUNT))

    chance = np.random.default_rng(seed)
    counts = np.array([0, 0, 3])
    none = np.empty(0, np.uint8)
    return ShardContents(array(), tuple(array() for _ in rule.slots), counts, np.zeros(2, np.int64), none)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("present", [[True, True, True], [True, False, True]])
def test_in_place_is_the_same_as_elsewhere(rule: Rule, present: list[bool]) -> None:
    before, after, in_place = contents_of(rule, 1), contents_of(rule, None), contents_of(rule, 1)
    change = np.random.default_rng(2).standard_normal(COUNT)
    scratch = (np.full(COUNT, np.nan), np.full(COUNT, np.nan))
    apply_change(SHARD, before, after, change, [rule] * 3, present, 0.5, scratch)
    apply_change(SHARD, in_place, in_place, change, [rule] * 3, present, 0.5, scratch)
    assert after.counts.tolist() == in_place.counts.tolist() == [1, int(present[1]), 4]
    for piece in SHARD.pieces:
        span = slice(piece.start, piece.stop)
        assert np.array_equal(after.values[span], in_place.values[span])
        assert np.array_equal(before.values[span], after.values[span]) != present[piece.parameter]
        for slot, other in zip(after.slots, in_place.slots, strict=True):
            assert np.array_equal(slot[span], other[span])
