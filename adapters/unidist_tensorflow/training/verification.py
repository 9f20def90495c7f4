"""`--verify` for Keras: the unchanged model is kept until the first batch, and both models compute the same of it.

For strategies that run the steps themselves (pipeline). Values that ranks hold in common are compared between the steps
of `fit` and at checkpoints: while a graph runs, a rank's variables are not at rest.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from unidist.strategy.interface import Plan
from unidist.verification import (
    MAX_COPIED_BYTES,
    FirstBatchCheck,
    Leaf,
    first_batch_check,
    pending_check,
)
from unidist_keras.checkpoint import trained_pieces

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

LossOfOutputs = Callable[[Any], Any]
"""From the unchanged model's outputs to the loss, without those that layers add."""


def output_check(model: Any, runtime: Context, plan: Plan) -> FirstBatchCheck | None:
    """Return the check of a model whose steps a strategy will run; None if there is none to be made.

    Args:
        model: with rank 0's values.
        runtime: whose ranks.
        plan: of the run.
    """
    check = first_batch_check(runtime, plan, model) if plan.runs_steps is not None else None
    if check is not None and check.computes:
        check.reference = _copied(model)
    return check


def attach(check: FirstBatchCheck, model: Any) -> None:
    """Leave the check for the first step of the distributed model."""
    check.attach(model, lambda: trained_pieces(model))


def before_step(model: Any, found: Callable[[], tuple[Any, Any]], inputs: Any, loss_of: LossOfOutputs) -> None:
    """Compare the first batch, before anything is trained. Collective over all ranks. For strategies with `RunsSteps`.

    Args:
        model: the distributed one.
        found: returns its outputs and loss on the batch, as in inference. Collective.
        inputs: of the batch.
        loss_of: see `LossOfOutputs`.

    Raises:
        MismatchError: on every rank; names the output and both values.
    """
    check = pending_check(model)
    if check is None:
        return

    def expected(reference: Any) -> tuple[Any, Any]:
        outputs = reference(inputs, training=False)
        return outputs, sum(reference.losses, loss_of(outputs))

    coarse = keras.config.dtype_policy().compute_dtype != keras.config.floatx()
    check.compare(expected, found, ("the output", "the loss"), _leaf, coarse=coarse)


def _copied(model: Any) -> Any:
    """Return a copy of a built model with its values, or None."""
    if not model.built or sum(int(np.prod(each.shape)) * 4 for each in model.weights) > MAX_COPIED_BYTES:
        return None
    states = random.getstate(), np.random.get_state()  # initial values that nobody needs draw from them
    try:
        made = keras.models.clone_model(model)
        made.set_weights(model.get_weights())
    except Exception as error:
        _log.debug("--verify: %s cannot be copied: %s", type(model).__name__, error)
        return None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return made


def _leaf(value: Any) -> Leaf | None:
    if not (tf.is_tensor(value) or isinstance(value, np.ndarray)):
        return None
    array = np.asarray(tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value)
    return Leaf(tuple(array.shape), tf.as_dtype(value.dtype).name, array)
