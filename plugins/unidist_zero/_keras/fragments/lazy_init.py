"""Lazy initialization at stage 3 in TensorFlow: a Keras model built without values gets them variable by variable.

Keras 3 makes variables without values within a `StatelessScope`, and keeps their initializers, whose numbers depend on
seeds that were drawn when the initializers were made: so it does not matter when they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # nothing public tells Keras which variables are to stay without

from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.operations.movement import broadcast
from unidist_tensorflow.training.lazy_init import lacks_value

_TO_BE_INITIALIZED = "uninitialized_variables"


@contextmanager
def without_values() -> Iterator[None]:
    """See `unidist_zero.deferred`."""
    before = list(global_state.get_global_attribute(_TO_BE_INITIALIZED) or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_TO_BE_INITIALIZED, before)  # else the next scope to end would do it


def make_equal(model: Any, num_ranks: int) -> None:
    """Give all ranks rank 0's values, after initializing variables that have none and are not trained. Collective.

    Args:
        model: built.
        num_ranks: of the run.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    for variable in _distinct(model.variables):
        if lacks_value(variable) and id(variable) not in trained:
            variable._deferred_initialize()
    if num_ranks > 1:
        broadcast_variables([each for each in model.weights if not lacks_value(each)], root_rank=0)


def first_value(variable: Any) -> Any:
    """Return a variable's values: its own, or rank 0's from its initializer. Collective in the latter case."""
    if not lacks_value(variable):
        return variable
    with tf.init_scope():
        made = tf.cast(variable._initializer(variable._shape, dtype=variable._dtype), variable._dtype)
        return broadcast(made, 0, f"first_value.{variable.path}")


def _distinct(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
