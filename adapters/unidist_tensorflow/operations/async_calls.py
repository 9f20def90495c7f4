"""Nodes of a graph that run a Python function asynchronously: they keep no inter-operation thread busy meanwhile.

TensorFlow has asynchronous nodes, but none for Python functions. See `graph` for the reason.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

Call = Callable[[], Sequence[Any]]


class AsyncCall(ABC):
    """Calls a function asynchronously, once in each run of the graph."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the call of this run: called by a Python function of the graph; returns at once."""

    @abstractmethod
    def results(self, begun: tf.Tensor, *, name: str) -> list[tf.Tensor]:
        """Add the node to the graph; it follows `begun`, whose function calls `begin`, and gives the call's results."""


def async_call(call: Call, dtypes: Sequence[tf.DType]) -> AsyncCall:
    """Return an asynchronous call for the graph that is being built.

    Args:
        call: returns an array for each of `dtypes`.
        dtypes: of the results.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return _ThreadCall(call, dtypes)
    return _IteratorCall(call, dtypes)


class _ThreadCall(AsyncCall):
    """For functions that run in eager mode: a thread calls, and reports by a queue, whose reader is asynchronous.

    A run that fails while it waits leaves the queue as it was. What was called for it then reports to nobody.
    """

    def __init__(self, call: Call, dtypes: Sequence[tf.DType]) -> None:
        self._call = call
        self._dtypes = dtypes
        self._lock = threading.Lock()
        self._run = 0  # the present run
        self._outcome: tuple[Sequence[Any], BaseException | None] | None = None  # reported and not collected
        self._reports = tf.queue.FIFOQueue(1, [tf.int64], [()])  # numbers of runs

    @override
    def begin(self) -> None:
        with self._lock:
            self._run += 1
            if self._outcome is not None:  # of a run that failed meanwhile; it did or did not read the report
                self._outcome = None
                if self._reports.size():
                    self._reports.dequeue()
            run = self._run
        threading.Thread(target=self._work, args=(run,), name="unidist-wait", daemon=True).start()

    @override
    def results(self, begun: tf.Tensor, *, name: str) -> list[tf.Tensor]:
        with tf.control_dependencies([begun]):
            run = self._reports.dequeue()
        return list(tf.identity_n(tf.numpy_function(self._collect, [run], list(self._dtypes)), name=name))

    def _work(self, run: int) -> None:
        results: Sequence[Any] = ()
        error: BaseException | None = None
        try:
            results = self._call()
        except BaseException as exc:  # raised by `_collect`, in the graph
            error = exc
        with self._lock:
            if run == self._run:
                self._outcome = results, error
                self._reports.enqueue(np.int64(run))

    def _collect(self, run: int) -> Sequence[Any]:
        with self._lock:
            assert run == self._run, "one run at a time"
            assert self._outcome is not None, "reported"
            (results, error), self._outcome = self._outcome, None
        if error is not None:
            raise error
        return results


class _IteratorCall(AsyncCall):
    """For TF1 graphs: nothing outside of a session can write to its queues.

    The function is mapped over a dataset, whose iterator has its own threads. A run that fails cancels its
    iterators for good, so each run makes a new one, which costs 2 ms.
    """

    def __init__(self, call: Call, dtypes: Sequence[tf.DType]) -> None:
        self._call = call
        self._dtypes = list(dtypes)

    @override
    def begin(self) -> None:
        """Do nothing: the iterator calls when it is asked for its element."""

    @override
    def results(self, begun: tf.Tensor, *, name: str) -> list[tf.Tensor]:
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        dataset = tf.data.Dataset.from_tensors(begun).map(self._step).with_options(options)
        types = {"output_types": self._dtypes, "output_shapes": [tf.TensorShape(None)] * len(self._dtypes)}
        iterator = tf.raw_ops.AnonymousIteratorV3(**types)
        made = tf.raw_ops.MakeIterator(dataset=tf.data.experimental.to_variant(dataset), iterator=iterator)
        with tf.control_dependencies([made]):
            return list(tf.raw_ops.IteratorGetNext(iterator=iterator, **types, name=name))

    @tf.autograph.experimental.do_not_convert
    def _step(self, begun: tf.Tensor) -> Any:
        del begun  # it is only to be there
        return tuple(tf.numpy_function(self._call, [], self._dtypes))
