"""`seed` in TensorFlow and Keras: different numbers for different samples, equal ones for the same. `device`."""

from __future__ import annotations

import random
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.keras as ud
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(("strategy", "groups"), [("", [0, 1]), ("tensor=2", [0, 0])])
def test_random_numbers_differ_on_the_data_axis_alone(
    pool: Callable[..., RankPool], strategy: str, groups: list[int]
) -> None:
    def draw() -> tuple[float, ...]:
        dropout = keras.layers.Dropout(0.5)
        kept = float(keras.ops.sum(dropout(np.arange(64.0), training=True)))
        return random.random(), float(np.random.rand()), float(tf.random.uniform(())), kept

    def on_rank() -> tuple[tuple[float, ...], tuple[float, ...]]:
        with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
            keras.utils.set_random_seed(7)
            alone = draw()
            ud.seed(7)
            return alone, draw()

    found = pool(2, "shm").run(on_rank)
    assert found[0][0] == found[0][1]
    for kind in range(4):
        first, second = (numbers[kind] for _, numbers in found)
        assert (first == second) == (groups[0] == groups[1])


def test_each_rank_has_a_device_of_its_own(pool: Callable[..., RankPool]) -> None:
    def on_rank() -> list[str]:
        with pytest.MonkeyPatch.context() as patch, runtime():
            devices = [ud.device()]
            patch.setattr(tf.config, "get_visible_devices", lambda kind: [object(), object()])
            devices.append(ud.device())
            with tf.device(devices[0]):
                assert tf.constant(1.0).device.endswith("CPU:0")
            return devices

    assert pool(2, "shm").run(on_rank) == [["/CPU:0", "/GPU:0"], ["/CPU:0", "/GPU:1"]]
