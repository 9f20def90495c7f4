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
from unidist.errors import ConfigurationError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables
from unidist.topology import Topology
from unidist_tensorflow.basics import choose_device

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


@pytest.mark.parametrize(
    ("installed", "visible", "local_size", "chosen"),
    [
        (4, 4, 2, [1]),
        (4, 1, 2, []),  # the script has chosen
        (2, 2, 1, []),  # a process that has its host for itself
        (2, 0, 2, []),
        (1, 1, 2, None),
    ],
)
def test_a_rank_sees_one_gpu_and_takes_what_it_needs_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, installed: int, visible: int, local_size: int, chosen: list[int] | None
) -> None:
    seen: list[int] = []
    growing: list[int] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(range(installed)))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(range(visible)))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: seen.append(device))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda device, grows: growing.append(device))
    place = Topology(local_size - 1, local_size, local_size - 1, local_size)
    if chosen is None:
        with pytest.raises(ConfigurationError, match=r"rank 1 sees 1 CUDA device.* runs 2 ranks"):
            choose_device(place)
    else:
        choose_device(place)
        assert (seen, growing) == (chosen, chosen)


def test_tensorflow_that_was_used_before_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: int, kind: str) -> None:
        raise RuntimeError("Physical devices must be set before they are initialized")

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [0, 1])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [0, 1])
    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    choose_device(Topology(1, 2, 1, 2))
    assert "rank 1: TensorFlow was used before init(), so this process holds memory of all 2 GPUs" in caplog.text


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
