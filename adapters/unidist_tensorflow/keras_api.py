"""The Keras behind `tf.keras`: Keras 3, or with TF_USE_LEGACY_KERAS=1 the package tf_keras.

Both have the same callbacks and layers by the same names, of different classes: a model takes those of the Keras that
    it was made with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

IS_LEGACY: bool = tf.keras.Model.__module__.startswith("tf_keras.")
"""`tf.keras` is tf_keras."""

api: Any = tf.keras if IS_LEGACY else keras
"""The module whose classes `tf.keras` models are made of."""

VARIABLES: tuple[type[Any], ...] = (tf.Variable, keras.Variable)
"""The classes of variables, TensorFlow's and Keras 3's; tf_keras has TensorFlow's."""


def layers() -> tuple[type[Any], ...]:
    """Return the classes of layers: Keras 3's, and tf_keras' if the script has imported it."""
    legacy = sys.modules.get("tf_keras")
    return (keras.layers.Layer,) if legacy is None else (keras.layers.Layer, legacy.layers.Layer)


def is_legacy_optimizer(optimizer: Any) -> bool:
    """Return whether this is an optimizer of tf_keras, of its present kind or of that before TensorFlow 2.11."""
    legacy = sys.modules.get("tf_keras")
    if legacy is None:
        return False
    return isinstance(optimizer, legacy.optimizers.Optimizer | legacy.optimizers.legacy.Optimizer)


def build_legacy_optimizer(optimizer: Any, variables: Sequence[Any], name: str | None = None) -> None:
    """Make the variables of an optimizer of tf_keras, if it has none yet, as its `apply_gradients` would."""
    scope = name or getattr(optimizer, "name", None) or getattr(optimizer, "_name", None)
    with tf.init_scope(), tf.name_scope(scope or "optimizer"):
        if is_old(optimizer):
            optimizer._create_all_weights(variables)
        else:
            optimizer.build(variables)


def is_old(optimizer: Any) -> bool:
    """Return whether an optimizer of tf_keras is one of before TensorFlow 2.11 (`tf_keras.optimizers.legacy`)."""
    return hasattr(optimizer, "_create_all_weights")
