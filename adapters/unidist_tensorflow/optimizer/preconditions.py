"""Preconditions of distributing training: Keras runs on TensorFlow, and nothing else distributes too."""

from __future__ import annotations

import keras
import tensorflow as tf

from unidist.errors import ConfigurationError


def check_can_distribute() -> None:
    """Raise if something else distributes training, or Keras does not run on TensorFlow.

    Raises:
        ConfigurationError: names it.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()!r}, and this is unidist's TensorFlow adapter: set "
            "KERAS_BACKEND=tensorflow"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ConfigurationError(
            f"keras.distribution is active ({type(distribution).__name__}): on TensorFlow it distributes nothing, and "
            "unidist would be in its way. Leave keras.distribution.set_distribution out"
        )
    if tf.distribute.has_strategy():
        strategy = type(tf.distribute.get_strategy()).__name__
        raise ConfigurationError(f"tf.distribute's {strategy} is active: two things exchange gradients. Leave one out")
