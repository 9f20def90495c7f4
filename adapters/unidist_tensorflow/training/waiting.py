"""Measures how long steps wait for their batches, in loops over a dataset and in `fit`, for the launcher to show."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from unidist.mixins import with_mixin
from unidist.runtime import context
from unidist.runtime_api import RuntimeAPI

_TRANSFORMATIONS = (
    *("apply", "batch", "cache", "concatenate", "enumerate", "filter", "flat_map", "interleave", "map"),
    *("padded_batch", "prefetch", "repeat", "shuffle", "skip", "take", "take_while", "unbatch", "with_options"),
)
"""Methods of a dataset whose result a script trains on in place of the dataset."""


def measured(dataset: Any) -> Any:
    """Return a dataset of which loops in Python count how long they wait for batches, also of what is made of it.

    It is the same object. Nothing is measured where a function that TensorFlow has compiled reads it: see
    `measure_fit`.
    """
    if isinstance(dataset, tf.data.Dataset) and not isinstance(dataset, _MeasuredMixin):
        dataset.__class__ = _measured_class(type(dataset), _MeasuredMixin)  # type: ignore[arg-type]  # classes are hashable
    return dataset


def measure_fit(model: Any) -> None:
    """Let `model.fit` count how long it waits for the batches of a dataset."""
    plain = model.fit

    @functools.wraps(plain)
    def fit(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(plain).bind(*args, **options)
        data = bound.arguments.get("x")
        if isinstance(data, tf.data.Dataset):
            bound.arguments["x"] = with_clock(data)
        return plain(*bound.args, **bound.kwargs)

    model.fit = fit


def with_clock(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the same batches, with an operation that counts how long their reader waits.

    It has to be the last transformation: what reads ahead behind it would be what waits.
    """
    total = context.current().owned(_Total)
    options = dataset.options().experimental_optimization
    if options.inject_prefetch is not False and type(dataset).__name__ != "_PrefetchDataset":
        # As TensorFlow does with a dataset that ends otherwise; here the last transformation is the clock's.
        dataset = dataset.prefetch(tf.data.AUTOTUNE)

    def note(begin: Any, batch: Any, end: Any) -> Any:
        total.seconds.assign_add(end - begin)
        return batch

    counted = tf.data.Dataset.zip((total.clock, dataset, total.clock)).map(note)
    own = tf.data.Options()
    own.experimental_optimization.inject_prefetch = False
    return counted.with_options(own)


class _Total:
    """The seconds that the operations of `with_clock` have counted, of one runtime, and the times that they count."""

    def __init__(self, runtime: RuntimeAPI) -> None:
        self.clock = tf.data.Dataset.range(1).repeat().map(lambda _: tf.timestamp())
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="unidist_data_sec")
        runtime.recorder.data_clocks.append(lambda: float(self.seconds.numpy()))

    def close(self) -> None:
        """Do nothing: what was counted stays."""


class _MeasuredMixin(Iterable[Any]):  # as TensorFlow's class: a mixin of another base has another layout
    """A dataset whose iterators count."""

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        iterator.__class__ = _measured_class(type(iterator), _MeasuredIteratorMixin)
        return iterator


class _MeasuredIteratorMixin(Iterator[Any]):
    """An iterator that counts how long it is waited for."""

    def __next__(self) -> Any:
        return _timed(super().__next__)

    def get_next(self) -> Any:
        return _timed(super().get_next)  # type: ignore[misc]  # TensorFlow's class has it


def _timed(read: Callable[[], Any]) -> Any:
    if not tf.executing_eagerly():
        return read()
    began = time.monotonic()
    batch = read()
    if context.is_initialized():
        context.current().recorder.data_sec += time.monotonic() - began
    return batch


def _of_measured(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(tf.data.Dataset, name))
    def transformed(self: Any, *args: Any, **options: Any) -> Any:
        return measured(getattr(super(_MeasuredMixin, self), name)(*args, **options))

    return transformed


@functools.cache
def _measured_class(plain: Any, mixin: Any) -> type[Any]:
    return with_mixin(plain, mixin)


for _name in _TRANSFORMATIONS:
    setattr(_MeasuredMixin, _name, _of_measured(_name))
