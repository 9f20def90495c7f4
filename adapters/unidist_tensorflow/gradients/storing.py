"""Nodes in C that bring gradients into the memory of an exchange, each as soon as it is computed.

A gradient is copied while it is in the caches, and TensorFlow has its memory back for the next one. A full bucket is
exchanged while the backward pass goes on. Without the C code (`is_available`) all gradients are inputs of the node that
exchanges them, whose Python function copies them when the last is there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from unidist.errors import UsageError
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.memory import address_of
from unidist_tensorflow.memory import NUMPY_DTYPES

_nodes: Any = None
with suppress(ImportError):  # built without a compiler
    from unidist_tensorflow import _nodes

_NAME = "unidist_store_of_a_gradient_which_needs_jit_compile_False"
_MODE, _BUCKET = 3, 4
"""Columns of the targets, of which C has the declaration."""

AttrValue = tf.compat.v1.AttrValue

_stores: WeakValueDictionary[int, GradientStore] = WeakValueDictionary()
"""By the address of each of their buckets' counters."""


@cache
def is_available() -> bool:
    """Return whether the nodes can be used: they were built, and this TensorFlow takes them."""
    if _nodes is None:
        return False
    folder, library = (flag[2:].removeprefix(":") for flag in tf.sysconfig.get_link_flags())
    try:
        _nodes.register_nodes(str(Path(folder, library)), bucket_full)
    except ImportError:
        return False
    return True


class GradientStore:
    """The nodes of one graph for one exchange.

    Args:
        exchange: whose memory the gradients go to.
        places: of the gradients that have nodes.
        sparse: places of the other gradients that are sparse on this rank.

    Attributes:
        buckets: places of those that are exchanged when they are full, by the addresses of their counters.
    """

    def __init__(self, exchange: FusedExchange, places: Sequence[int], sparse: Collection[int]) -> None:
        self.places = places
        self._exchange = exchange
        self._sparse = sparse
        count = len(exchange.variables)
        # Both are read and written by the nodes.
        self._targets = np.zeros((count, _BUCKET + 1), np.int64)
        self._waiting = np.zeros(count, np.int64)  # by bucket
        self._sizes = np.zeros(count, np.int64)
        self.buckets: dict[int, list[int]] = {}
        self._dtypes = {NUMPY_DTYPES[info.dtype]: _nodes.DTYPES.index(str(info.dtype)) for info in exchange.variables}
        self._layout = 0
        self._lock = threading.Lock()
        self._early: set[int] = set()  # places of this pass whose exchange may have started
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Tell the nodes where gradients go, before they run. Collective the first time.

        Raises:
            UsageError: an earlier pass has sent a part of its gradients, and then failed.
        """
        exchange = self._exchange
        exchange.begin(self._sparse)
        if self._early and self._layout == exchange.layout and exchange.update.window.in_round:
            raise UsageError(
                f"an earlier step of rank {exchange.update.context.topology.rank} failed after a part of its gradients "
                "was sent, so the ranks cannot go on together: end the job, and go on from a checkpoint"
            )
        if self._layout != exchange.layout:
            self._layout = exchange.layout
            self._plan_buckets()
            self._fill(self.places)
        elif exchange.update.window.in_round:
            self._fill(self.places)
        else:
            self._targets[self.places, _MODE] = _nodes.WRITE
        self._waiting[:] = self._sizes
        self._early, self._failure = set(), None

    def _fill(self, places: Sequence[int]) -> None:
        for place in places:
            memory, is_added = self._exchange.memory_of(place)
            mode = _nodes.ADD if is_added else _nodes.WRITE
            self._targets[place, :_BUCKET] = address_of(memory), memory.nbytes, self._dtypes[memory.dtype], mode

    def _plan_buckets(self) -> None:
        together: dict[object, list[int]] = {}
        for place in range(len(self._exchange.variables)):
            if (bucket := self._exchange.early_bucket(place)) is not None:
                together.setdefault(bucket, []).append(place)
        self.buckets = {}
        self._sizes[:] = self._targets[:, _BUCKET] = 0
        for number, places in enumerate(together.values()):
            if set(places) <= set(self.places):
                address = address_of(self._waiting[number:])
                self.buckets[address] = places
                self._targets[places, _BUCKET] = address
                self._sizes[number] = len(places)
                _stores[address] = self

    def end(self) -> list[int]:
        """Let no node run before the next `begin`; returns the places that the exchange does not know of yet.

        Raises:
            UnidistError: what the exchange of a full bucket has raised.
        """
        self._targets[:, _MODE] = _nodes.NOT_READY
        early, self._early = self._early, set()
        if self._failure is not None:
            raise self._failure
        return [place for place in self.places if place not in early]

    def bucket_full(self, address: int) -> None:
        """Start the exchange of a bucket, on a thread of TensorFlow."""
        with self._lock:
            places = self.buckets[address]
            self._early.update(places)
            try:
                self._exchange.ready(places)
            except Exception as exc:  # raised by the node that waits for the exchange, in the graph
                self._failure = self._failure or exc

    def add_node(self, gradient: tf.Tensor, place: int) -> tf.Operation:
        """Add a node to the graph that is being built; it must not run before `begin`."""
        graph = tf.compat.v1.get_default_graph()
        targets = AttrValue(i=address_of(self._targets))
        attributes = {"targets": targets, "place": AttrValue(i=place)}
        return graph.create_op("UnidistStoreGradient", [gradient], [], attrs=attributes, name=_NAME)


def bucket_full(address: int) -> None:
    """Start the exchange of the bucket whose counter is at an address; C calls it."""
    store = _stores.get(address)
    if store is not None:
        store.bucket_full(address)
