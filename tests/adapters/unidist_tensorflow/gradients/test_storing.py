"""Gradients that the nodes in C bring into the memory of the exchange, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo

pytest.importorskip("tensorflow")

from part_pools import PartPools

pytestmark = pytest.mark.parallel

_WIDTHS = (40, 300, 50, 300, 20)
_STEPS = 4


def train(strategy: str, *options: str) -> tuple[list[Any], list[int], list[str]]:
    """Return the weights after some steps, the buckets started early in each, and modules that AutoGraph converted."""
    import keras
    import tensorflow as tf
    from tensorflow.python.autograph.impl import api

    import unidist.keras as ud
    from unidist_tensorflow.gradients import storing

    ud.init()
    rank, size = ud.rank(), ud.size()
    converted: list[str] = []
    early: list[int] = []
    available = storing.is_available
    convert, full = api._convert_actual, storing.GradientStore.bucket_full

    def noting_conversions(entity: Any, program: Any) -> Any:
        converted.append(getattr(entity, "__module__", ""))
        return convert(entity, program)

    def noting_buckets(self: Any, address: int) -> None:
        early[-1] += 1
        full(self, address)

    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    api._convert_actual = noting_conversions
    storing.GradientStore.bucket_full = noting_buckets
    if "without C" in options:
        storing.is_available = lambda: False
    try:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((30,)), *(keras.layers.Dense(width, "tanh") for width in _WIDTHS)])
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1, momentum=0.9), strategy or None)
        generator = np.random.default_rng(0)
        x, y = (generator.normal(size=(_STEPS, 8, width)) for width in (30, _WIDTHS[-1]))

        @tf.function
        def step(x: Any, y: Any, leave_out: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            if leave_out:
                gradients[1] = None
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        for number in range(_STEPS):
            early.append(0)
            own = slice(rank, None, size)
            step(tf.constant(x[number, own]), tf.constant(y[number, own]), f"rank {rank} lacks one" in options)
        return model.get_weights(), early, [each for each in converted if each.startswith("unidist")]
    finally:
        keras.config.set_floatx(floatx)
        api._convert_actual, storing.GradientStore.bucket_full = convert, full
        storing.is_available = available
        ud.shutdown()


@pytest.mark.parametrize("strategy", ["data:bucket_mb=0.1", "data:bucket_mb=0.1,accumulate=2", "zero=1", "without C"])
def test_full_buckets_start_early_and_the_numbers_are_those_of_one_process(
    tensorflow_pools: PartPools, strategy: str
) -> None:
    [(expected, _, _)] = tensorflow_pools.get(1).run(train, ("accumulate=2" if "accumulate" in strategy else "",))
    for found, early, converted in tensorflow_pools.get(2).run(
        train, ("" if strategy == "without C" else strategy, strategy)
    ):
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
        if strategy == "data:bucket_mb=0.1":
            assert min(early) >= 2
        assert set(converted) <= {"unidist_keras.mixin"}  # what the script calls; not what runs in every step


def test_a_gradient_that_one_rank_lacks_keeps_its_bucket_for_the_end(tensorflow_pools: PartPools) -> None:
    (first, _, _), (second, early, _) = tensorflow_pools.get(2).run(train, ("data:bucket_mb=0.1", "rank 1 lacks one"))
    assert all(np.array_equal(own, other) for own, other in zip(first, second, strict=True))
    assert min(early) >= 1


class _Exchange:
    """Two variables of one bucket, whose exchange starts when it is full."""

    layout = 1
    variables = (ParameterInfo("a", (2,), DType.FLOAT32), ParameterInfo("b", (3,), DType.FLOAT32))
    update = SimpleNamespace(
        window=SimpleNamespace(in_round=False), context=SimpleNamespace(topology=SimpleNamespace(rank=4))
    )

    def begin(self, sparse: Collection[int]) -> None: ...

    def early_bucket(self, place: int) -> str:
        return "bucket"

    def memory_of(self, place: int) -> tuple[Any, bool]:
        return np.zeros(self.variables[place].shape, np.float32), False

    def ready(self, stored: Collection[int]) -> None:
        self.update.window.in_round = True


def test_a_step_that_failed_after_it_had_sent_something_is_the_last_one() -> None:
    from unidist_tensorflow.gradients.storing import GradientStore, bucket_full

    store = GradientStore(_Exchange(), (0, 1), ())  # type: ignore[arg-type]
    store.begin()
    [bucket] = store.buckets
    bucket_full(bucket)
    assert store.end() == []
    _Exchange.update.window.in_round = False
    store.begin()
    bucket_full(bucket)
    with pytest.raises(UsageError, match="an earlier step of rank 4 failed after a part of its gradients was sent"):
        store.begin()
