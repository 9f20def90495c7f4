"""Metrics of Keras over the samples of all ranks, for training and evaluation loops of the script's own."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import keras
import numpy as np

from unidist.buffer import Buffer
from unidist.errors import MismatchError, UsageError
from unidist.runtime import context
from unidist.training.sample_axis import SampleAxis

__all__ = ["metrics"]

MetricT = TypeVar("MetricT")


def metrics(metric: MetricT) -> MetricT:
    """Compute a Keras metric over the samples of all ranks; returns what was given.

        auc = ud.metrics(keras.metrics.AUC())

    Each rank updates the metric with its own samples, of which ranks may have different numbers. `result` is collective
    and returns the value that one process would. Ranks that train on the same samples (of a divided model) count once.
    For metrics whose variables are sums over samples, as those of Keras are, outside of `fit` and `tf.function`.

    Args:
        metric: a `keras.metrics.Metric`, or a list or dict of them.

    Raises:
        UsageError: something else was given.
    """
    if isinstance(metric, dict | list | tuple):
        for each in metric.values() if isinstance(metric, dict) else metric:
            metrics(each)
        return metric
    if not isinstance(metric, keras.metrics.Metric):
        raise UsageError(f"metrics: {type(metric).__name__} is no metric of Keras, and no list or dict of them")
    plain: Any = metric.result

    @functools.wraps(plain)
    def result() -> Any:
        if not context.is_initialized() or (axis := context.current().owned(SampleAxis)).size == 1:
            return plain()
        return _result_of_all(metric, plain, axis)

    metric.result = result  # of this object
    return metric


def _result_of_all(metric: keras.metrics.Metric, plain: Any, axis: SampleAxis) -> Any:
    """Return the result for the sums of all ranks' variables; the variables stay this rank's. Collective."""
    try:
        own = [keras.ops.convert_to_numpy(variable) for variable in metric.variables]
    except Exception as error:
        raise UsageError(
            f"metrics: the result of {metric.name!r} was asked for while a function is traced (fit, tf.function, "
            "jax.jit), where the ranks cannot be asked. Call result() outside of it; fit has MetricAverageCallback"
        ) from error
    sizes = axis.rows_of_all(sum(each.size for each in own))
    if len(set(sizes)) > 1:
        listed = ", ".join(f"rank {rank} of {axis.size}: {size}" for rank, size in enumerate(sizes))
        raise MismatchError(
            f"metrics: the state of {metric.name!r} has different sizes on the ranks ({listed} numbers). Make the same "
            "metric on all of them; one that is built by its first update has to have had it on each rank"
        )
    flat = np.concatenate([each.reshape(-1).astype(np.float64) for each in own]) if own else np.zeros(0)
    everyone = np.zeros((axis.size, flat.size))
    axis.gather(_buffer(flat), _buffer(everyone), [1] * axis.size)
    total = everyone.sum(axis=0)
    begin = 0
    try:
        for variable, value in zip(metric.variables, own, strict=True):
            variable.assign(total[begin : begin + value.size].reshape(value.shape).astype(value.dtype))
            begin += value.size
        return plain()
    finally:
        for variable, value in zip(metric.variables, own, strict=True):
            variable.assign(value)


def _buffer(array: np.ndarray[Any, np.dtype[np.float64]]) -> Buffer:
    return Buffer.of(array)
