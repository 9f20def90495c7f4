"""Optimizers of Keras on variables and slots in bfloat16, and the rounding of what they have updated."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.precision import Precision, Rounding
from unidist.optim.rounding_key import RoundingKey
from unidist_keras.slots import slot_lists
from unidist_tensorflow.optimizer.narrow_update import update_by
from unidist_tensorflow.optimizer.stochastic_rounding import Elements, random_bits, round_stochastically

NUMBER = tf.constant(7, tf.uint32)
NAMES = ("AdamW", "SGD", "Nadam", "Muon", "Adafactor", "Ftrl", "ScheduleFreeAdamW")


def narrow(optimizer: Any, rounding: Rounding = Rounding.STOCHASTIC) -> Any:
    """Return the update of an optimizer."""
    kind = DType.BFLOAT16
    return update_by(optimizer, type(optimizer), Precision(kind, kind, kind, rounding=rounding))


def rounded(values: Any, elements: list[Elements]) -> Any:
    """Return rounded values in 32 bits."""
    return np.array(tf.cast(round_stochastically(tf.constant(values, tf.float32), elements, "", NUMBER), tf.float32))


def test_rounding_goes_to_a_neighbour_and_is_right_in_the_mean() -> None:
    value = np.float32(1 + 2**-7 * 0.3)  # between 1 and 1 + 2^-7
    found = rounded(np.full(100_000, value), [Elements(0, 0, 100_000)])
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert abs(found.mean() - value) < 3 * 2**-7 * 0.46 / 100_000**0.5
    exact = [0.0, -0.0, 1.5, -3.0, np.inf, -np.inf]
    np.testing.assert_array_equal(rounded(exact, [Elements(0, 0, 6)]), exact)
    assert np.isnan(rounded([np.nan, -np.nan], [Elements(0, 0, 2)])).all()


def test_parts_of_variables_are_rounded_as_the_whole() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype("float32")
    whole = rounded(values, [Elements(3, 0, 1000)])
    other = rounded(values, [Elements(4, 0, 1000)])
    assert not np.array_equal(whole, other)
    joined = rounded(
        np.concatenate([values[600:], values[:100], values[:0]]),
        [Elements(3, 600, 400), Elements(4, 0, 100), Elements(5, 0, 0)],
    )
    np.testing.assert_array_equal(joined, np.concatenate([whole[600:], other[:100]]))


def test_the_numbers_are_those_of_the_other_frameworks() -> None:
    """Which `random_bits` of the JAX adapter returns for the same arguments."""
    found = random_bits(6, RoundingKey.of(3, "m"), NUMBER, 1000)
    assert np.array(found).tolist() == [24688, 5011, 40133, 23374, 28499, 61457]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_computed_in_32_bits(name: str) -> None:
    """The first update is that of float32 variables with the same values, rounded to a neighbour; slots, too."""
    start = tf.cast(np.random.default_rng(0).normal(size=(6, 4)), tf.bfloat16)
    gradient = tf.cast(np.random.default_rng(1).normal(size=(6, 4)), tf.bfloat16)
    own, wide = (getattr(keras.optimizers, name)(0.01, weight_decay=0.1) for _ in range(2))
    variable = keras.Variable(start, dtype="bfloat16", name="kernel")
    expected = keras.Variable(tf.cast(start, tf.float32), dtype="float32", name="kernel")
    plain = variable._value
    own.build([variable])
    wide.build([expected])
    update = narrow(own)
    tf.function(lambda: update([gradient], [variable], {}))()
    wide.apply([tf.cast(gradient, tf.float32)], [expected])
    slots = zip(slot_lists(own).values(), slot_lists(wide).values(), strict=True)
    for found, right in ((variable, expected), *((one[0], other[0]) for one, other in slots)):
        values, wanted = np.array(tf.cast(found.value, tf.float32)), np.array(right.value)
        np.testing.assert_allclose(values, wanted, rtol=2**-7, atol=1e-30)
    assert variable.dtype == "bfloat16"
    assert variable._value is plain
    assert int(own.iterations) == 1


def test_small_updates_are_lost_to_the_nearest_alone() -> None:
    found = {}
    for rounding in Rounding:
        optimizer = keras.optimizers.SGD(2.0**-12)
        variable = keras.Variable(np.ones(4096), dtype="bfloat16", name="kernel")
        optimizer.build([variable])
        update = narrow(optimizer, rounding)
        for _ in range(8):
            update([tf.ones(4096, tf.bfloat16)], [variable], {})
        found[rounding] = float(tf.reduce_mean(tf.cast(variable.value, tf.float64)))
    assert found[Rounding.NEAREST] == 1.0
    assert abs(found[Rounding.STOCHASTIC] - (1 - 8 * 2.0**-12)) < 3e-4


def test_without_a_gradient_nothing_changes_and_other_types_are_left_alone() -> None:
    optimizer = keras.optimizers.Adam(0.01)
    given = [
        keras.Variable(np.ones(3), dtype=dtype, name=f"of_{dtype}") for dtype in ("bfloat16", "float32", "bfloat16")
    ]
    optimizer.build(given)
    rows = tf.IndexedSlices(tf.ones(2, tf.bfloat16), tf.constant([0, 0]), tf.constant([3]))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        narrow(optimizer)([None, tf.ones(3), rows], given, {})
    assert np.array(given[0].value).tolist() == [1, 1, 1]
    assert abs(float(given[1].value[0]) - 0.99) < 1e-6
    assert [float(each) != 1 for each in given[2].value] == [True, False, False]


@pytest.mark.parametrize("option", [{"use_ema": True}, {"gradient_accumulation_steps": 2}])
def test_what_cannot_be_rounded_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        narrow(keras.optimizers.Adam(**option))
