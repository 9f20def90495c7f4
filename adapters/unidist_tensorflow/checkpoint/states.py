"""The states of a checkpoint that are TensorFlow's own; those of Keras are in `unidist_keras.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist_keras import checkpoint
from unidist_tensorflow.framework import TensorFlowFramework


class KerasStates(checkpoint.KerasStates):
    """The states of Keras models, optimizers and random generators."""

    framework = TensorFlowFramework()

    @override
    def random(self, rank: int, models: Mapping[str, Any]) -> KeepsState:
        return KerasRandom(rank, models)


class KerasRandom(checkpoint.KerasRandom):
    """The seeds of the models' layers and TensorFlow's global generator, beside Python's and numpy's."""

    @override
    def others(self) -> dict[str, Any]:
        return {"tensorflow": tf.random.get_global_generator().state}
